"""Several nodes: who takes part in a job, agreed on by all, with no node that the others cannot lose. docs/nodes.md tells how."""
