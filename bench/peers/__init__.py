"""Other attention kernels, measured beside ours when their packages are installed.

A peer exports `NAME`, `unavailable(shape) -> str | None` (why it cannot run here or for that shape) and
`candidates(inputs) -> iterator of (settings, function, arguments, calls, output)`: `function(*arguments)` makes
`calls` calls, one for each rotated page table, and `output(result)` is the first call's `[T, H, D]`.
"""
