package integration_test

import (
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	yaml "go.yaml.in/yaml/v3"
)

// Grafana finds the board where it is mounted, and what the board reads where Compose runs it; traces come to the store
// that it reads.
func TestDeploy_Observability(t *testing.T) {
	sequential(t)
	c := readCompose(t, "docker-compose.yml")
	for _, name := range []string{"prometheus", "grafana", "jaeger", "trace"} {
		if s := c.Services[name]; !slices.Contains(s.Profiles, "observability") {
			t.Errorf("%s has profiles %v; want observability", name, s.Profiles)
		}
	}
	// reached reports whether a service can reach another by its URL.
	reached := func(from, address string) bool {
		u, err := url.Parse(address)
		if err != nil {
			return false
		}
		common := func(n string) bool { return n != "host" && slices.Contains(c.Services[from].Networks, n) }
		return slices.ContainsFunc(c.Services[u.Hostname()].Networks, common)
	}
	if to := c.Services["trace"].Environment["OTEL_EXPORTER_OTLP_ENDPOINT"]; !reached("trace", to) ||
		!strings.Contains(to, "jaeger") {
		t.Errorf("traces go to %q, which trace does not reach", to)
	}
	var sources struct {
		Datasources []struct{ Type, URL string }
	}
	const provisioning = "deploy/grafana/provisioning/"
	if err := yaml.Unmarshal([]byte(read(t, provisioning+"datasources/meander.yml")), &sources); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]bool{}
	for _, s := range sources.Datasources {
		kinds[s.Type] = true
		if !reached("grafana", s.URL) {
			t.Errorf("Grafana does not reach %s", s.URL)
		}
	}
	board := read(t, "deploy/grafana/meander.json")
	for _, m := range regexp.MustCompile(`"type": "datasource",\s+"query": "(\w+)"`).FindAllStringSubmatch(board, -1) {
		if !kinds[m[1]] {
			t.Errorf("the board reads %s, and data sources are of %v", m[1], kinds)
		}
	}
	var boards struct {
		Providers []struct{ Options struct{ Path string } }
	}
	if err := yaml.Unmarshal([]byte(read(t, provisioning+"dashboards/meander.yml")), &boards); err != nil {
		t.Fatal(err)
	}
	home := regexp.MustCompile(`(?m)^default_home_dashboard_path = (.*)$`).FindStringSubmatch(read(t, "deploy/grafana/grafana.ini"))
	if home == nil || len(boards.Providers) != 1 || !slices.ContainsFunc(c.Services["grafana"].Volumes,
		func(v volume) bool {
			return v.Target == home[1] && path.Dir(v.Target) == boards.Providers[0].Options.Path &&
				v.Source == "./deploy/grafana/meander.json"
		}) {
		t.Errorf("home %q and provider %+v; want the board as it is mounted: %+v", home, boards,
			c.Services["grafana"].Volumes)
	}
}
