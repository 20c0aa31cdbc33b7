"""Every private name of torch, every difference between torch 2.11 and 2.15, and every patch of torch (`patches`).

Imports nothing of ours but `errors` and `dtypes`. What `import ampcompile` or the gradient scaler needs of it loads
neither Dynamo nor Inductor: `dispatcher`, `marks`, `optimizers`, `patches`, `pytree`, `storages`.
If a new release of torch renames something, this room is adapted, with the version that needs it; the rooms above see
no difference.
"""
