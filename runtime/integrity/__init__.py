"""Page tags: who notices that a page is no longer the one that a request wrote."""
