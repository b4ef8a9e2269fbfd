"""The model repositories before the start: laid out, and looked at the way a replica will look at them."""

from replicas.layout import LayoutError, lay_out
from replicas.repository import RepositoryError, check_model
from tidegate.settings import Loaded
from tidegate.supervisor.record import UpError


def lay_out_models(loaded: Loaded) -> list[str]:
    """Lay out every pool; what will keep a pool's replicas from starting, one sentence each.

    Raises:
        UpError: a repository cannot be laid out.
    """
    wrong = []
    for name, pool in loaded.pools.items():
        repository = loaded.repository(name)
        try:
            lay_out(repository.parent)
        except (LayoutError, OSError) as error:
            raise UpError(f"the model repository of pool {name} cannot be laid out: {error}") from error
        for model in pool.model_names:
            try:
                check_model(repository, model)
            except RepositoryError as error:
                wrong.append(f"pool {name} cannot start a replica: {error}")
    return wrong
