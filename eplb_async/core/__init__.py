"""Pure core: numpy and the standard library only. No I/O, no clock, no logging."""
