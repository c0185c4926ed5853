"""An extension of vLLM's worker: reload weights so that every layer really computes with them.

vLLM's reload_weights leaves a tied output layer with the packed copy of the old embedding on a CPU: log-probs of a tiny
model were off by 1.1 nats. vLLM takes this class by --worker-extension-cls; only the engine's process loads it.
"""

from typing import Any


class ReloadExtension:
    """Mixed into the worker by vLLM; `reload_and_repack` is called over /collective_rpc."""

    model_runner: Any

    def reload_and_repack(self, weights_path: str) -> int:
        """Reload from a folder, then pack anew what was packed from tied weights; returns how many layers were."""
        self.model_runner.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        embedding = next((m for name, m in model.named_modules() if name.endswith("embed_tokens")), None)
        num_packed = 0
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not hasattr(module, "cpu_linear") or weight is None or weight.numel() == 0:
                continue  # not packed, or packed by the reload itself
            if embedding is not None and _is_tied(model, module, embedding):
                module.weight = embedding.weight
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            num_packed += 1
        return num_packed


def _is_tied(model: Any, module: Any, embedding: Any) -> bool:
    config = getattr(model, "config", None)
    return (
        module is getattr(model, "lm_head", None)
        and module is not embedding
        and bool(getattr(config, "tie_word_embeddings", False))
    )
