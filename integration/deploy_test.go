package integration_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// volume is one mount of a service, in the long form.
type volume struct {
	Type, Source, Target string
	ReadOnly             bool `yaml:"read_only"`
	Bind                 struct {
		CreateHostPath *bool `yaml:"create_host_path"`
	}
}

// compose is what these tests read of docker-compose.yml. Merge keys are resolved by
// the decoder. No container engine is needed, and none is asked.
type compose struct {
	Services map[string]struct {
		Image string
		Build struct {
			Dockerfile, Context, Target string
			Args                        map[string]string
		}
		Deploy      struct{ Replicas string }
		User        string
		Command     []string
		Restart     string
		ReadOnly    bool     `yaml:"read_only"`
		CapDrop     []string `yaml:"cap_drop"`
		SecurityOpt []string `yaml:"security_opt"`
		Profiles    []string
		Ports       []string
		Volumes     []volume
		Networks    []string
		Environment map[string]string
		StopGrace   string                  `yaml:"stop_grace_period"`
		Healthcheck struct{ Test []string } `yaml:"healthcheck"`
		Secrets     []string
		DependsOn   map[string]map[string]any `yaml:"depends_on"`
	}
	Networks map[string]any
	Volumes  map[string]any
	Secrets  map[string]struct{ File string }
}

func readCompose(t *testing.T, file string) compose {
	t.Helper()
	var c compose
	if err := yaml.Unmarshal([]byte(read(t, file)), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// expand puts in the defaults of compose's variables, with only the token set.
func expand(text string) string {
	variable := regexp.MustCompile(`\$\{([A-Z0-9_]+)(:[-?+])?([^${}]*)\}`) // innermost first
	for variable.MatchString(text) {
		text = variable.ReplaceAllStringFunc(text, func(v string) string {
			m := variable.FindStringSubmatch(v)
			switch {
			case m[1] == "MEANDER_NATS_TOKEN":
				return "secret-of-the-test"
			case m[2] == ":-":
				return m[3]
			}
			return ""
		})
	}
	return text
}

func TestDeploy_Compose(t *testing.T) {
	sequential(t)
	c := readCompose(t, "docker-compose.yml")
	for _, name := range []string{"nats", "intake", "sampler", "reward", "advantage", "meander"} {
		if _, ok := c.Services[name]; !ok {
			t.Errorf("no service %s", name)
		}
	}
	for name, s := range c.Services {
		t.Run(name, func(t *testing.T) {
			if !s.ReadOnly || !slices.Contains(s.CapDrop, "ALL") ||
				!slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
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
				if _, declared := c.Volumes[v.Source]; v.Type == "volume" && declared {
					continue
				}
				create := v.Bind.CreateHostPath
				if v.Type != "bind" || !v.ReadOnly || create == nil || *create {
					t.Errorf("mount %+v; must be a declared volume, or bound read-only to what is there", v)
				}
				if _, err := os.Stat(filepath.Join(root, expand(v.Source))); err != nil {
					t.Error(err)
				}
			}
			for d := range s.DependsOn {
				if _, ok := c.Services[d]; !ok {
					t.Errorf("depends on %s, which is no service", d)
				}
			}
			if s.Build.Context == "" { // somebody else's image: it gets no token
				if user, _, _ := strings.Cut(s.User, ":"); user == "" || user == "0" || user == "root" ||
					len(s.Environment) != 0 {
					t.Errorf("user %q, environment %v; want no rights and no settings", s.User, s.Environment)
				}
				if pinned := regexp.MustCompile(`:v?\d+\.\d+\.\d+`); !pinned.MatchString(s.Image) {
					t.Errorf("image %s is not pinned", s.Image)
				}
			} else if name == "torch" { // a worker, which knows nothing of the server
				told := strings.Join(slices.Collect(maps.Values(s.Environment)), " ")
				if slices.Contains(s.Networks, "events") || strings.Contains(told, "TOKEN") {
					t.Errorf("networks %v, environment %v; want no server and no token", s.Networks, s.Environment)
				}
			} else if has := s.Environment; !strings.Contains(has["MEANDER_NATS_TOKEN"]+has["MEANDER_NATS_URL"],
				"${MEANDER_NATS_TOKEN:?") {
				// No password has a default: compose itself refuses to start without one.
				t.Errorf("environment %v; the token must be required", has)
			}
			if s.Restart != "unless-stopped" || len(s.Healthcheck.Test) == 0 {
				t.Errorf("restart %q, health check %v; want both", s.Restart, s.Healthcheck.Test)
			}
			if d, err := time.ParseDuration(s.StopGrace); err != nil || d < 30*time.Second {
				t.Errorf("stop_grace_period %q; must outlast the drain", s.StopGrace)
			}
		})
	}
	for _, name := range []string{"intake", "sampler", "reward", "advantage"} {
		s := c.Services[name]
		if len(s.Ports) != 0 || len(s.Profiles) != 0 {
			t.Errorf("%s: ports %v, profiles %v; want none", name, s.Ports, s.Profiles)
		}
		if !strings.HasPrefix(s.Deploy.Replicas, "${MEANDER_") || expand(s.Deploy.Replicas) != "1" {
			t.Errorf("%s: replicas %q; must be a setting, 1 by default", name, s.Deploy.Replicas)
		}
	}
	if got := c.Services["meander"].Profiles; !slices.Equal(got, []string{"all-in-one"}) {
		t.Errorf("meander has profiles %v; want all-in-one alone, or it would start beside the four", got)
	}
}

// Whatever is started together listens on ports of its own.
func TestDeploy_Ports(t *testing.T) {
	sequential(t)
	taken := map[string]string{}
	for _, file := range composeFiles {
		for name, s := range readCompose(t, file).Services {
			for _, p := range s.Ports {
				published := strings.Split(expand(p), ":")[1]
				if other := taken[published]; other != "" {
					t.Errorf("%s and %s both publish port %s", name, other, published)
				}
				taken[published] = name
			}
		}
	}
	if len(taken) < 5 {
		t.Errorf("ports %v; the three servers', the all-in-one's and Prometheus' at least", taken)
	}
}

// The programs take what compose gives them: no variable that they do not know, no flag
// that is not there. Prometheus finds each where it serves its metrics.
func TestDeploy_ProgramsTakeTheirSettings(t *testing.T) {
	sequential(t)
	t.Parallel()
	c := readCompose(t, "docker-compose.yml")
	var scrape struct {
		Configs []struct {
			DNS []struct {
				Names []string
				Port  string
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal([]byte(read(t, "deploy/prometheus.yml")), &scrape); err != nil {
		t.Fatal(err)
	}
	targets := scrape.Configs[0].DNS[0]
	programs := 0
	for name, s := range c.Services {
		if s.Build.Args["PROGRAM"] == "" {
			continue
		}
		programs++
		args := []string{"--print-config"}
		if s.Command != nil {
			args = nil
			for _, a := range s.Command {
				args = append(args, expand(a))
			}
			args = append(args, "--help") // after the others have been read
		}
		cmd := exec.Command(program(t, s.Build.Args["PROGRAM"]), args...)
		cmd.Dir, cmd.Env = t.TempDir(), []string{}
		for k, v := range s.Environment {
			cmd.Env = append(cmd.Env, k+"="+expand(v))
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %v: %v\n%s", name, args, err, out)
		}
		if name == "trace" { // a reader, which counts nothing
			continue
		}
		metrics := `health_addr: "0.0.0.0:` + targets.Port + `"`
		if s.Command != nil {
			out, metrics = []byte(strings.Join(s.Command, "\n")), "--metrics-addr=0.0.0.0:"+targets.Port
		}
		if !slices.Contains(targets.Names, name) || !strings.Contains(string(out), metrics) {
			t.Errorf("%s is not scraped where it serves its metrics: %v:%s\n%s", name, targets.Names, targets.Port, out)
		}
	}
	if programs != 8 || len(targets.Names) != 7 {
		t.Errorf("%d programs and %v scraped, want 8 and 7 of them", programs, targets.Names)
	}
}

// make stops what any profile started, and says which Compose it needs.
func TestDeploy_Make(t *testing.T) {
	sequential(t)
	t.Parallel()
	profiles := map[string]bool{}
	for _, s := range readCompose(t, "docker-compose.yml").Services {
		for _, p := range s.Profiles {
			profiles[p] = true
		}
	}
	out, err := exec.Command("make", "-C", root, "--dry-run", "down").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for p := range profiles {
		if !strings.Contains(string(out), "--profile "+p+" ") {
			t.Errorf("make down leaves the profile %s running:\n%s", p, out)
		}
	}
	for _, v := range []struct {
		version string
		enough  bool
	}{{"", false}, {"2.19.1", false}, {"v2.20.0", true}, {"2.39.1-desktop.1", true}, {"5.0.0", true}} {
		bin := t.TempDir()
		script := "#!/bin/sh\n[ -n '" + v.version + "' ] && echo '" + v.version + "' || exit 1\n"
		if err := harness.WriteProgram(filepath.Join(bin, "docker"), []byte(script)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("make", "-C", root, "compose-plugin")
		cmd.Env = append(os.Environ(), "PATH="+bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if (err == nil) != v.enough || !v.enough && !strings.Contains(string(out), "2.20 or newer") {
			t.Errorf("with Compose %q: %v\n%s", v.version, err, out)
		}
	}
}

// The images are made of what the Makefile builds and of Debian's packages, and each
// leaves root. Compose names programs and stages that exist.
func TestDeploy_Dockerfile(t *testing.T) {
	sequential(t)
	text, makefile := read(t, "deploy/Dockerfile"), read(t, "Makefile")+read(t, "integration/Makefile")
	if !regexp.MustCompile(`(?m)^flags +:= .*-trimpath`).MatchString(makefile) ||
		!regexp.MustCompile(`(?m)^export GOFLAGS := .*\$\(flags\)`).MatchString(makefile) {
		t.Error("the Makefile builds without -trimpath")
	}
	for _, target := range regexp.MustCompile(`\bmake ([a-z-]+) VERSION=`).FindAllStringSubmatch(text, -1) {
		recipe := regexp.MustCompile(`(?m)^` + target[1] + `: .*\n((?:\t.*\n)+)`).FindString(makefile)
		if !strings.Contains(recipe, "-o bin/") || !strings.Contains(recipe, "CGO_ENABLED=") {
			t.Errorf("make %s: %q; want a build into bin/", target[1], recipe)
		}
	}
	stages := map[string]string{} // their instructions, by name
	for _, part := range strings.Split(text, "\nFROM ")[1:] {
		head, body, _ := strings.Cut(part, "\n")
		_, name, named := strings.Cut(head, " AS ")
		if !named {
			t.Errorf("stage %q has no name", head)
		}
		stages[name] = head + "\n" + body
	}
	if !strings.HasPrefix(stages["static"], "scratch ") || !strings.HasSuffix(text, stages["static"]) {
		t.Error("the default image must be the static one, on nothing")
	}
	for name, stage := range stages {
		if strings.Contains(stage, "ENTRYPOINT") && !strings.Contains(stage, "\nUSER 65532:65532\n") {
			t.Errorf("%s does not leave root", name)
		}
		for _, m := range regexp.MustCompile(`--from=(\S+)`).FindAllStringSubmatch(stage, -1) {
			if stages[m[1]] == "" {
				t.Errorf("%s copies from %s, which is no stage", name, m[1])
			}
		}
	}
	if foreign := regexp.MustCompile(`(?m)^(ADD|RUN .*(curl|wget|pip|npm|https?:))`).FindString(text); foreign != "" {
		t.Errorf("%q: only Debian's packages and our own build", foreign)
	}
	if nats := read(t, "deploy/nats/Dockerfile"); !strings.Contains(nats, "USER 65532:65532") {
		t.Error("the server does not leave root")
	}
	for name, s := range readCompose(t, "docker-compose.yml").Services {
		if p := s.Build.Args["PROGRAM"]; p != "" {
			if _, err := os.Stat(filepath.Join(root, "services/cmd", p)); err != nil {
				t.Error(err)
			}
		}
		if target := expand(s.Build.Target); target != "" && stages[target] == "" {
			t.Errorf("%s: target %s is no stage", name, target)
		}
	}
	if stages["full"] == "" || !strings.Contains(stages["full"], "tesseract-ocr") {
		t.Error("no image with tesseract")
	}
}

// The server that the tests embed reads the configuration that compose mounts.
func TestDeploy_NATSConfig(t *testing.T) {
	sequential(t)
	t.Setenv("MEANDER_NATS_TOKEN", "secret-of-the-test")
	options, err := server.ProcessConfigFile(filepath.Join(root, "deploy/nats/nats.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if users := options.Users; options.Authorization != "" || len(users) != 1 ||
		users[0].Password != "secret-of-the-test" ||
		users[0].Account.GetName() != "meander" {
		t.Errorf("users %+v; want one in the account meander, with MEANDER_NATS_TOKEN", users)
	}
	if !options.JetStream || options.StoreDir != "/data" || options.JetStreamMaxStore < 1<<30 {
		t.Errorf("JetStream %v on %q with %d bytes; want it on /data with gigabytes", options.JetStream,
			options.StoreDir,
			options.JetStreamMaxStore)
	}
	if options.SyncInterval != time.Second || options.SyncAlways {
		t.Errorf("sync interval %v, always %v; the README promises one second", options.SyncInterval,
			options.SyncAlways)
	}
	if options.HTTPHost != "127.0.0.1" {
		t.Errorf("monitoring listens on %q; must be loopback", options.HTTPHost)
	}
	// The default is what the event plane is made for.
	if options.MaxPayload != 0 && options.MaxPayload != 1<<20 {
		t.Errorf("max_payload %d; want the default of 1 MiB", options.MaxPayload)
	}
}
