-- Nothing new starts and running Jobs are suspended; users stay served.
obj.spec.suspend = true
return obj
