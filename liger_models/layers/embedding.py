"""Token embeddings."""

import torch
from torch import Tensor, nn

from liger_models import ops


class LigerEmbedding(nn.Embedding):
    """torch.nn.Embedding on the kernel set, with an optional factor.

    Args:
        num_embeddings, embedding_dim, padding_idx: as in torch.nn.Embedding.
        scale: factor on the embeddings, rounded to the weight's dtype before it is applied (Gemma), or None.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, scale: float | None = None):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.scale = scale
        if scale is not None:  # rounded here: as a tensor, torch.compile folds it into the product unrounded
            dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
            self._rounded = {dtype: torch.tensor(scale, dtype=dtype, device="cpu").item() for dtype in dtypes}

    def forward(self, input: Tensor) -> Tensor:
        embedded = ops.embedding(input, self.weight, self.padding_idx)
        if self.scale is None:
            return embedded
        return embedded * self._rounded[self.weight.dtype]
