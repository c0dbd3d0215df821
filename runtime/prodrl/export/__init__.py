"""From the trainer's weights to a servable policy with an identity.

``run`` is the step ``prodrl export`` and reads as the story: publish the base model (round 0), load a copy, quantise
it or keep it, check the files, give them a digest, write them. ``fetch`` is its counterpart on a server's side.
``source``, ``calibration``, ``quantise``, ``verify`` and ``identity`` each hold one of these ideas.
"""
