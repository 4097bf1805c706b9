"""What a recipe will keep and send, computed from the same stage table that runs it."""
