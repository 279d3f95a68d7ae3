"""The one place that knows devices beside the CPU: their streams, their memory, page-locked memory below them.

Nothing else names ``torch.cuda`` (a test looks). What one kind of device has and another has not is an entry in the
table of `tapestream.accelerator.device`.
"""
