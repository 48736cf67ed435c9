"""The devices of a node: who they are, whether they are well, which of them are set aside, and how they come back."""
