-- Let a stalled run try again: any token that was not used before. Looked at again: the menu may be older than the stall.
local stalled, failed, halted = nil, false, false
if obj.status ~= nil then
  failed = obj.status.currentRound ~= nil and obj.status.currentRound.step == "Failed"
  halted = obj.status.haltedRound ~= nil
  for _, condition in ipairs(obj.status.conditions or {}) do
    if condition.type == "Stalled" and condition.status == "True" then
      stalled = condition
    end
  end
end
if stalled == nil then
  error("the run is not stalled; there is nothing to retry")
end
if stalled.reason == "InvalidSpec" or not (failed or halted or stalled.reason == "GateInconclusive") then
  error("a retry cannot cure " .. stalled.reason .. ": " .. (stalled.message or "see the run's conditions"))
end
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.retryToken = os.date("!%Y-%m-%dT%H:%M:%SZ")
return obj
