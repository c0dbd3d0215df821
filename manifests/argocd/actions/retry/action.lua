-- Let a stalled run try again: any token that was not used before.
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.retryToken = os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
