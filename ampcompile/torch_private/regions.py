"""The functions that a traced graph calls where a region of autocast, of gradients or of inference begins and ends."""

import torch

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
