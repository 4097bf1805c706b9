"""Communication: collectives of our own (ZeRO++), and the ledger of the bytes that each rank sends.
It never knows stages or models."""
