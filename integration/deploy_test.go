package integration_test

import (
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	yaml "go.yaml.in/yaml/v3"
)

// compose is what these tests read of docker-compose.yml. Merge keys are resolved by
// the decoder. No container engine is needed, and none is asked.
type compose struct {
	Services map[string]struct {
		Image       string
		Build       struct{ Dockerfile, Context string }
		User        string
		Command     []string
		Restart     string
		ReadOnly    bool     `yaml:"read_only"`
		CapDrop     []string `yaml:"cap_drop"`
		SecurityOpt []string `yaml:"security_opt"`
		Profiles    []string
		Ports       []string
		Volumes     []string
		Networks    []string
		Environment map[string]string
		StopGrace   string                    `yaml:"stop_grace_period"`
		Healthcheck struct{ Test []string }   `yaml:"healthcheck"`
		DependsOn   map[string]map[string]any `yaml:"depends_on"`
	}
	Networks map[string]any
	Volumes  map[string]any
}

func readCompose(t *testing.T) compose {
	t.Helper()
	var c compose
	if err := yaml.Unmarshal([]byte(read(t, "docker-compose.yml")), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDeploy_Compose(t *testing.T) {
	c := readCompose(t)
	for _, name := range []string{"nats", "intake", "sampler", "reward", "advantage", "meander"} {
		if _, ok := c.Services[name]; !ok {
			t.Errorf("no service %s", name)
		}
	}
	for name, s := range c.Services {
		t.Run(name, func(t *testing.T) {
			if !s.ReadOnly || !slices.Contains(s.CapDrop, "ALL") || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
				t.Error("not hardened: read_only, cap_drop ALL and no-new-privileges belong to each container")
			}
			for _, p := range s.Ports {
				if !strings.HasPrefix(p, "127.0.0.1:") {
					t.Errorf("port %s is published beyond loopback", p)
				}
			}
			for _, n := range s.Networks {
				if _, ok := c.Networks[n]; !ok {
					t.Errorf("network %s is not declared", n)
				}
			}
			for _, v := range s.Volumes {
				source, _, _ := strings.Cut(v, ":")
				if strings.HasPrefix(source, ".") {
					read(t, strings.TrimPrefix(source, "./"))
				} else if _, ok := c.Volumes[source]; !ok {
					t.Errorf("volume %s is not declared", source)
				}
			}
			for d := range s.DependsOn {
				if _, ok := c.Services[d]; !ok {
					t.Errorf("depends on %s, which is no service", d)
				}
			}
			if text := read(t, path.Join(s.Build.Context, s.Build.Dockerfile)); !strings.Contains(text, "USER 65532:65532") {
				t.Errorf("%s does not leave root", s.Build.Dockerfile)
			}
			if s.Restart != "unless-stopped" || len(s.Healthcheck.Test) == 0 {
				t.Errorf("restart %q, health check %v; want both", s.Restart, s.Healthcheck.Test)
			}
			if d, err := time.ParseDuration(s.StopGrace); err != nil || d < 30*time.Second {
				t.Errorf("stop_grace_period %q; must outlast the drain", s.StopGrace)
			}
			// No password has a default: compose itself refuses to start without one.
			if token := s.Environment["MEANDER_NATS_TOKEN"]; !strings.HasPrefix(token, "${MEANDER_NATS_TOKEN:?") {
				t.Errorf("MEANDER_NATS_TOKEN: %q; must be required from the environment", token)
			}
		})
	}
	for _, name := range []string{"intake", "sampler", "reward", "advantage"} {
		s := c.Services[name]
		if len(s.Ports) != 0 || len(s.Profiles) != 0 {
			t.Errorf("%s: ports %v, profiles %v; want none", name, s.Ports, s.Profiles)
		}
	}
	if got := c.Services["meander"].Profiles; !slices.Equal(got, []string{"all-in-one"}) {
		t.Errorf("meander has profiles %v; want all-in-one alone, or it would start beside the four", got)
	}
}

// The image's program names and stamped variables are those of the source.
func TestDeploy_Dockerfile(t *testing.T) {
	text := read(t, "deploy/Dockerfile")
	for _, want := range []string{"FROM scratch", "CGO_ENABLED=0", "-trimpath"} {
		if !strings.Contains(text, want) {
			t.Errorf("Dockerfile without %q", want)
		}
	}
	programs, err := filepath.Glob(filepath.Join(root, "services/cmd/*"))
	if err != nil {
		t.Fatal(err)
	}
	arg := regexp.MustCompile(`PROGRAM: ([a-z-]+)`)
	for _, m := range arg.FindAllStringSubmatch(read(t, "docker-compose.yml"), -1) {
		if !slices.Contains(programs, filepath.Join(root, "services/cmd", m[1])) {
			t.Errorf("compose builds %s, which is not in services/cmd", m[1])
		}
	}
}

// The server that the tests embed reads the configuration that compose mounts.
func TestDeploy_NATSConfig(t *testing.T) {
	t.Setenv("MEANDER_NATS_TOKEN", "secret-of-the-test")
	options, err := server.ProcessConfigFile(filepath.Join(root, "deploy/nats.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if options.Authorization != "secret-of-the-test" {
		t.Error("the token does not come from MEANDER_NATS_TOKEN")
	}
	if !options.JetStream || options.StoreDir != "/data" || options.JetStreamMaxStore < 1<<30 {
		t.Errorf("JetStream %v on %q with %d bytes; want it on /data with gigabytes", options.JetStream, options.StoreDir, options.JetStreamMaxStore)
	}
	if options.SyncInterval != time.Second || options.SyncAlways {
		t.Errorf("sync interval %v, always %v; the README promises one second", options.SyncInterval, options.SyncAlways)
	}
	if options.HTTPHost != "127.0.0.1" {
		t.Errorf("monitoring listens on %q; must be loopback", options.HTTPHost)
	}
	// The default is what the event plane is made for.
	if options.MaxPayload != 0 && options.MaxPayload != 1<<20 {
		t.Errorf("max_payload %d; want the default of 1 MiB", options.MaxPayload)
	}
}
