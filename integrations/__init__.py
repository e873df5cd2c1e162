"""quire in the libraries that people use a model with. Each file needs its library: ``pip install 'quire[integrations]'``.

Most of what these libraries do needs nothing from here: after ``quire.paged(model)`` their calls of ``model.generate`` and
``model.generate_batch`` are paged.
"""
