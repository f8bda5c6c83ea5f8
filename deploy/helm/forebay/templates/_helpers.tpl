{{/* The beginning of every name: the release, with the name of the chart unless the release has it. The name of a CronJob has
52 characters at most. */}}
{{- define "forebay.name" -}}
{{- $name := ternary .Release.Name (printf "%s-forebay" .Release.Name) (contains "forebay" .Release.Name) -}}
{{- trunc 42 $name | trimSuffix "-" -}}
{{- end }}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "forebay.labels" -}}
{{ include "forebay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "forebay.image" -}}
{{- $repository := required "image.repository is empty: build the image from the Containerfile, push it to your registry, and name it here" .Values.image.repository -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Refuses values that contradict each other. */}}
{{- define "forebay.check" -}}
{{- $values := .Values -}}
{{- if and $values.postgres.secret $values.sqlite.enabled -}}
{{- fail "postgres.secret and sqlite.enabled are both set: choose one database" -}}
{{- else if not (or $values.postgres.secret $values.sqlite.enabled) -}}
{{- fail "no database: name the Secret with the URL of a Postgres in postgres.secret, or set sqlite.enabled and replicas=1" -}}
{{- end -}}
{{- if and $values.sqlite.enabled (gt (int $values.replicas) 1) -}}
{{- fail (printf "replicas is %d, but only one process can serve a SQLite database: set replicas=1, or use Postgres" (int $values.replicas)) -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host" -}}
{{- end -}}
{{- if and $values.monitoring.serviceMonitor (not $values.monitoring.keySecret) -}}
{{- fail "monitoring.serviceMonitor needs monitoring.keySecret: /metrics needs a key of role `read`" -}}
{{- end -}}
{{- $config := fromToml $values.config -}}
{{- if hasKey $config "Error" -}}
{{- fail (printf "config is not TOML: %s" $config.Error) -}}
{{- end -}}
{{- range $key := list "listen" "database" "log" -}}
{{- if hasKey $config $key -}}
{{- fail (printf "config sets `%s`, which the chart sets" $key) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $config "tls" -}}
{{- fail "config has [tls], but this chart leaves encryption to the ingress: its probes and its ServiceMonitor use HTTP" -}}
{{- end -}}
{{- $listeners := include "forebay.listeners" . | fromJson -}}
{{- range $name, $address := $listeners -}}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\]):[1-9][0-9]*$" $address) -}}
{{- fail (printf "the listener `%s` of config has the address %s, which the Service cannot reach: write 0.0.0.0:PORT" $name $address) -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.agentsHost (not (hasKey $listeners "agents")) -}}
{{- fail "ingress.agentsHost needs `listen` in [sessions] of config" -}}
{{- end -}}
{{- end }}

{{/* The addresses of the configured listeners besides the API, by the names of their ports. */}}
{{- define "forebay.listeners" -}}
{{- $config := fromToml .Values.config -}}
{{- $found := dict -}}
{{- with dig "sessions" "listen" "" $config -}}
{{- $_ := set $found "agents" . -}}
{{- end -}}
{{- range $name, $facade := dig "facades" dict $config -}}
{{- $_ := set $found $name (kindIs "string" $facade | ternary $facade (get (kindIs "map" $facade | ternary $facade dict) "listen")) -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* What the service and the job of the first key have in common. */}}
{{- define "forebay.database" -}}
- name: FOREBAY_DATABASE
{{- if .Values.sqlite.enabled }}
  value: sqlite:/data/forebay.db
{{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.postgres.secret }}
      key: {{ .Values.postgres.key }}
{{- end }}
{{- end }}

{{- define "forebay.container" -}}
image: {{ include "forebay.image" . | quote }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "forebay.pod" -}}
automountServiceAccountToken: false
{{- with .Values.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
# A Service with the name forebay would otherwise set variables that begin with FOREBAY_.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "forebay.volumes" -}}
{{- if .Values.sqlite.enabled }}
- name: data
  persistentVolumeClaim:
    claimName: {{ include "forebay.name" . }}
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "forebay.mounts" -}}
{{- if .Values.sqlite.enabled }}
- name: data
  mountPath: /data
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
