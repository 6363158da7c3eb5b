package integration_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// The janitor of meander-intake frees all that is stored of closed groups, and blobs, with the rights of intake alone.
func TestRoles_Janitor(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	for service, more := range map[string][]string{
		"intake": {"--gc-age", "1s", "--gc-grace", "1s", "--gc-every", "1s"}, "sampler": {"--model", "synthetic"},
		"reward": nil, "advantage": nil,
	} {
		launch(t, t.TempDir(), program(t, "meander-"+service), append([]string{
			"--health-addr", "", "--nats-url", g.url,
			"--nats-creds", g.file(service + ".creds"), "--nats-tls-ca", g.file("tls/ca.pem"),
		}, more...)...)
	}
	// of a batch, whose result is freed as well
	run := []string{"publish", "--run", "a", "--batch-size", "2", "-n", "2", "a red fox", "two owls"}
	meander(t, t.TempDir(), append(run, g.flags("trainer")...)...).must(t, 0)

	admin, intake := g.bus(t, "admin"), g.bus(t, "intake")
	bustest.Until(t, "the run is freed", func() error {
		for _, stream := range append(slices.Collect(maps.Keys(schemas.GroupFilters("*", "*", "*"))),
			schemas.StreamPrompts) {
			info, err := admin.StreamInfo(t.Context(), stream)
			if err != nil {
				return err
			}
			if s := info.State; s.Msgs > 0 || s.LastSeq == 0 && stream != schemas.StreamVerdicts {
				return fmt.Errorf("%s has %d messages of %d", stream, s.Msgs, s.LastSeq)
			}
		}
		return nil
	})
	// Blobs stay for minutes before a pass takes them: here without that grace.
	if _, err := admin.PutBlob(t.Context(), []byte("what no event names")); err != nil {
		t.Fatal(err)
	}
	if n, err := intake.SweepBlobs(t.Context(), 0, false); err != nil || n == 0 {
		t.Errorf("intake freed %d blobs: %v; want the one", n, err)
	}
	for line := range strings.Lines(g.log()) {
		if strings.Contains(line, "iolation") && (strings.Contains(line, "PURGE") || strings.Contains(line, "DELETE")) {
			t.Error(line)
		}
	}
}

// bus is a connection of a user.
func (g guarded) bus(t *testing.T, user string) *bus.Bus {
	t.Helper()
	return bustest.Connect(t, bus.Config{URL: g.url, CredsFile: g.file(user + ".creds"), CAFile: g.file("tls/ca.pem")})
}
