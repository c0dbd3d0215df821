-- Promote the round that waits for a person.
if obj.status == nil or obj.status.currentRound == nil then
  return obj
end
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.approveRound = obj.status.currentRound.number
return obj
