package command

import "testing"

func TestUp_Usage(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, "--listen: ", "up", "--nats", "nats://127.0.0.1:1", "--listen", "127.0.0.1:0")
	expect(t, exitUsage, "replicas: 0; must be between 1 and 64", "up", "--replicas", "0")
	expect(t, exitUsage, `folder of credentials: ""`, "up", "--auth", "")
	expect(t, exitUsage, "--nats-tls-ca: given without a server", "up", "--nats-tls-ca", "ca.pem")
	t.Setenv("MEANDER_NATS_TLS_CA", "ca.pem")
	t.Setenv("MEANDER_NATS_CREDS", "x.creds")
	expect(t, exitUsage, "--nats-creds (from MEANDER_NATS_CREDS): given without a server", "up")
	expect(t, exitUsage, "--nats-tls-ca (from MEANDER_NATS_TLS_CA): given without a server", "up")
	expect(t, exitUsage, "--nats-creds: given", "up", "--nats-creds", "y.creds") // the flag wins
	t.Setenv("MEANDER_NATS_URL", "nats://127.0.0.1:1")
	expect(t, exitUsage, "leave one of --listen and --nats (from MEANDER_NATS_URL) out", "up", "--listen", "127.0.0.1:0")
	expect(t, exitUsage, "leave one of --auth and --nats (from MEANDER_NATS_URL) out", "up", "--auth", "auth")
	t.Setenv("MEANDER_LOG_LEVEL", "loud")
	expect(t, exitUsage, `--log-level (from MEANDER_LOG_LEVEL): "loud"`, "streams")
	expect(t, exitUsage, "takes no arguments", "up", "now")
}
