{{/* One release, one operator: the Lease is named so, and two releases in a namespace would only wait for each other. */}}
{{- define "prodrl.name" -}}prodrl-operator{{- end }}

{{- define "prodrl.selector" -}}
app.kubernetes.io/name: prodrl-operator
{{- end }}

{{- define "prodrl.labels" -}}
app.kubernetes.io/name: prodrl-operator
app.kubernetes.io/part-of: prodrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "prodrl.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "prodrl.priorityClassName" -}}
{{- if .Values.priorityClassName -}}
{{ .Values.priorityClassName }}
{{- else if and (eq .Values.scope "Cluster") .Values.priorityClass.create -}}
{{ include "prodrl.name" . }}
{{- end -}}
{{- end }}
