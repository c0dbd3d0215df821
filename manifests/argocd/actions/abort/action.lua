-- End the round in work; users stay with stable.
if obj.status == nil or obj.status.currentRound == nil then
  return obj
end
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.abortRound = obj.status.currentRound.number
return obj
