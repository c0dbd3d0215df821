"""The object store: port, two implementations, and folders with manifests.

``open_store(StoreConfig)`` gives a :class:`~prodrl.store.port.Store`; ``folders`` writes and reads verified
folders (data first, manifest last); ``layout`` spells every key.
"""
