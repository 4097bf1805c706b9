"""Communication: the collectives that are our own (ZeRO++), and the ledger of who sent how many bytes.
Never knows stages or models."""
