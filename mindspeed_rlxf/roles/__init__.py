"""Actor with rollout, reference, critic and reward: plain classes over one engine each."""
