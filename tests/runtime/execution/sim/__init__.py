"""A simulated GPU: tensors that say that they are on it, with all that a step would have to wait for.

`with device.watch() as events:` keeps what happens; `events.stalls` lists what no steady step may do. FlashInfer's
kernels are those of `attention/stand_in.py`. No time passes on the device: what waits in vain for it is not seen.
"""
