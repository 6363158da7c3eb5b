package command

import "testing"

// A flag or folder from a variable that is not set is a mistake.
func TestAuth_Empty(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitUsage, `folder of credentials: ""`, "auth", "init", "")
	expect(t, exitUsage, `--tls-host: ""`, "auth", "init", "auth", "--tls-host", "")
	expect(t, exitUsage, `--tls-host: "a,"`, "auth", "init", "auth", "--tls-host", "a,")
	expect(t, exitOK, "auth is ready", "auth", "init", "auth", "--tls")
	expect(t, exitUsage, `--tls-host: ""`, "auth", "update", "auth", "--tls-host", "")
	expect(t, exitUsage, `role: ""`, "auth", "add", "auth", "alice", "--role", "")
	expect(t, exitOK, "has the role trainer", "auth", "add", "auth", "alice", "--role", "trainer")
}
