-- Promote the round that waits for a person. Looked at again: the menu may be older than the round.
local current, waits = nil, false
if obj.status ~= nil then
  current = obj.status.currentRound
  for _, condition in ipairs(obj.status.conditions or {}) do
    local asks = condition.type == "Progressing" and condition.reason == "AwaitingApproval"
    local unsure = condition.type == "Stalled" and condition.status == "True" and condition.reason == "GateInconclusive"
    waits = waits or asks or unsure
  end
end
if current == nil or current.number == 0 or not waits then
  error("no round of this run waits for approval; there is nothing to approve")
end
obj.spec.requests = obj.spec.requests or {}
obj.spec.requests.approveRound = current.number
return obj
