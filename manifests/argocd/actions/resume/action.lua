-- The loop goes on.
obj.spec.suspend = false
return obj
