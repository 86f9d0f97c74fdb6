"""What operators measure without a server: `ramet bench policies`, `ramet profile`, `ramet verify`."""
