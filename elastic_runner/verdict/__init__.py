"""The verdict on a rehearsal: the same job with and without chaos, and whether the chaos has made any difference that it must not make."""
