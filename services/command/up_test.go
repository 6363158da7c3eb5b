package command

import "testing"

func TestUp_Usage(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, "--listen: ", "up", "--nats", "nats://127.0.0.1:1", "--listen", "127.0.0.1:0")
	expect(t, exitUsage, "replicas: 0; must be between 1 and 64", "up", "--replicas", "0")
	expect(t, exitUsage, `folder of credentials: ""`, "up", "--auth", "")
	expect(t, exitUsage, "takes no arguments", "up", "now")
}
