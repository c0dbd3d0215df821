-- Which of the actions make sense now. Each writes only what Git could have written: fields of spec.
local conditions = {}
local current = nil
if obj.status ~= nil then
  for _, condition in ipairs(obj.status.conditions or {}) do
    conditions[condition.type] = condition
  end
  current = obj.status.currentRound
end

local stalled = conditions["Stalled"] ~= nil and conditions["Stalled"].status == "True"
local stalled_reason = stalled and conditions["Stalled"].reason or ""
local doing = conditions["Progressing"] ~= nil and conditions["Progressing"].reason or ""
local suspended = obj.spec ~= nil and obj.spec.suspend == true
local deleting = obj.metadata.deletionTimestamp ~= nil

-- Round 0 deploys the base model: there is nothing to fall back to.
local ended = { Promoted = true, Blocked = true, Aborted = true, Superseded = true }
local in_work = current ~= nil and current.number > 0 and not ended[current.step] and not deleting
local stable = obj.status ~= nil and obj.status.stable or nil
local committed = in_work and stable ~= nil and stable.round == current.number

-- What else stalls a run goes on by itself once its cause is cured.
local failed = current ~= nil and current.step == "Failed"
local halted = obj.status ~= nil and obj.status.haltedRound ~= nil
local retried = stalled and (failed or halted or stalled_reason == "GateInconclusive")

local actions = {}
actions["abort"] = { ["disabled"] = not in_work or committed }
actions["approve"] = {
  ["disabled"] = not (in_work and (doing == "AwaitingApproval" or stalled_reason == "GateInconclusive")),
}
actions["retry"] = { ["disabled"] = not retried or stalled_reason == "InvalidSpec" or deleting }
actions["suspend"] = { ["disabled"] = suspended or deleting }
actions["resume"] = { ["disabled"] = not suspended or deleting }
return actions
