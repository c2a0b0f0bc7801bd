"""Token embeddings."""

from torch import Tensor, nn

from liger_models import ops


class LigerEmbedding(nn.Embedding):
    """torch.nn.Embedding on the kernel set."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.embedding(input, self.weight, self.padding_idx)
