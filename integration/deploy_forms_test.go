package integration_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// form is docker-compose.yml with one of the forms over it, as Compose merges them; added are the
// services that the form alone has.
func form(t *testing.T, file string) (merged compose, added []string) {
	t.Helper()
	merged = readCompose(t, composeFiles[0])
	over := readCompose(t, file)
	for name, s := range over.Services {
		base, ok := merged.Services[name]
		if !ok {
			added = append(added, name)
			merged.Services[name] = s
			continue
		}
		for k, v := range s.Environment {
			base.Environment[k] = v
		}
		if s.Command != nil {
			base.Command = s.Command
		}
		base.Volumes = append(base.Volumes, s.Volumes...)
		merged.Services[name] = base
	}
	maps.Copy(merged.Volumes, over.Volumes)
	return merged, added
}

// What a form adds is as careful as what it stands on, each service has the keys of its own role
// alone, and the programs take their settings.
func TestDeploy_Forms(t *testing.T) {
	sequential(t)
	t.Parallel()
	for _, file := range composeFiles[1:3] {
		merged, added := form(t, file)
		for _, name := range added {
			s := merged.Services[name]
			if !s.ReadOnly || !slices.Contains(s.CapDrop, "ALL") ||
				!slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
				t.Errorf("%s: %s is not hardened", file, name)
			}
			for _, p := range s.Ports {
				if !strings.HasPrefix(p, "127.0.0.1:") {
					t.Errorf("%s: %s: port %s is published beyond loopback", file, name, p)
				}
			}
		}
		for name, s := range merged.Services {
			for _, v := range s.Volumes {
				if _, declared := merged.Volumes[v.Source]; v.Type == "volume" && !declared {
					t.Errorf("%s: %s: volume %s is not declared", file, name, v.Source)
				}
				_, role, isKeys := strings.Cut(v.Source, "/containers/")
				of := map[string]string{
					"sampler-gpu": "sampler", "sampler-torch": "sampler", "streams": "admin",
					"trace": "viewer",
				}[name]
				if isKeys && (!v.ReadOnly || role != name && role != of) {
					t.Errorf("%s: %s has the keys of %s", file, name, role)
				}
			}
			program := s.Build.Args["PROGRAM"]
			if program == "" || name == "meander" {
				continue
			}
			args := []string{"--print-config"}
			if s.Command != nil {
				args = nil
				for _, a := range s.Command {
					args = append(args, expand(a))
				}
				args = append(args, "--help")
			}
			cmd := exec.Command(harness.Program(t, program), args...)
			cmd.Dir, cmd.Env = t.TempDir(), []string{}
			for k, v := range s.Environment {
				cmd.Env = append(cmd.Env, k+"="+expand(v))
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %s %v: %v\n%s", file, name, args, err, out)
			}
		}
	}
}

// Each server of both forms at once has what the first has of the secure one: none takes a token.
func TestDeploy_FormsTogether(t *testing.T) {
	sequential(t)
	want := readCompose(t, "deploy/compose.secure.yml").Services["nats"].Volumes
	together := readCompose(t, "deploy/compose.secure-cluster.yml").Services
	servers := 0
	for name, s := range readCompose(t, "deploy/compose.cluster.yml").Services {
		if s.Image != "meander-nats" {
			continue
		}
		servers++
		if got := together[name].Volumes; !reflect.DeepEqual(got, want) {
			t.Errorf("%s has %+v, want %+v", name, got, want)
		}
	}
	if servers != 2 {
		t.Errorf("%d servers beside the first, want 2", servers)
	}
	out, err := exec.Command("make", "-C", root, "--dry-run", "up", "PROFILE=cluster,secure").CombinedOutput()
	if err != nil || !strings.Contains(string(out),
		"--file deploy/compose.secure.yml --file deploy/compose.cluster.yml --file deploy/compose.secure-cluster.yml") {
		t.Errorf("make up with both: %v\n%s", err, out)
	}
}

// The server reads the configuration of each form.
func TestDeploy_FormsOfTheServer(t *testing.T) {
	sequential(t)
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "auth")
	meander(t, dir, "auth", "init", keys, "--tls").must(t, 0)
	if err := os.CopyFS(filepath.Join(dir, "nats"), os.DirFS(filepath.Join(root, "deploy/nats"))); err != nil {
		t.Fatal(err)
	}
	// As the containers have it: secure in place of access, and the keys beside it.
	access := strings.NewReplacer("/etc/nats/keys", keys+"/tls", "../keys/",
		"../../auth/").Replace(read(t, "deploy/nats/secure/access.conf"))
	if err := os.WriteFile(filepath.Join(dir, "nats/access/access.conf"), []byte(access), 0o600); err != nil {
		t.Fatal(err)
	}
	// The variables of cluster.conf are its own: here they are set for one process alone.
	config := read(t, "deploy/nats/cluster.conf")
	for name, value := range readCompose(t, "deploy/compose.cluster.yml").Services["nats-2"].Environment {
		config = strings.ReplaceAll(config, "$"+name, `"`+expand(value)+`"`)
	}
	if err := os.WriteFile(filepath.Join(dir, "nats/cluster.conf"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	options, err := server.ProcessConfigFile(filepath.Join(dir, "nats/cluster.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if options.Authorization != "" || len(options.Nkeys) < 8 || options.TLSConfig == nil || !options.JetStream ||
		options.StoreDir != "/data" {
		t.Errorf("token %q, %d users, TLS %v, JetStream %v on %q", options.Authorization, len(options.Nkeys),
			options.TLSConfig != nil, options.JetStream, options.StoreDir)
	}
	if options.ServerName != "nats-2" || len(options.Routes) != 2 || options.Cluster.Password != "secret-of-the-test" ||
		!options.Cluster.NoAdvertise {
		t.Errorf("server %q, routes %v, cluster %+v", options.ServerName, options.Routes, options.Cluster)
	}
}

// make up refuses by name what it cannot bring the stack to, before anything of it is stopped or started.
func TestDeploy_FormsRefused(t *testing.T) {
	sequential(t)
	t.Parallel()
	type engine struct{ runtimes, containers, volumes string }
	one, three := engine{"runc", "nats", "events"}, engine{"runc nvidia", "nats nats-2", "cluster-1"}
	for _, v := range []struct {
		settings, says string
		here           engine
	}{
		{"PROFILE=sekure", "there is no sekure; must be of secure cluster all-in-one gpu metrics observability torch", one},
		{"PROFILE=secure,claster", "there is no claster", one},
		{"COMPOSE_PROFILES=metrics,secure", "secure must be in PROFILE", one},
		{"PROFILE=gpu", `no runtime "nvidia"`, one},
		{"COMPOSE_PROFILES=metrics,gpu", `no runtime "nvidia"`, one},
		{"PROFILE=gpu", "", engine{runtimes: "runc nvidia"}},
		{"PROFILE=torch MEANDER_TORCH_RUNTIME=nvidia", `MEANDER_TORCH_RUNTIME: docker has no runtime "nvidia"`, one},
		{"PROFILE=torch MEANDER_TORCH_RUNTIME=nvidia", "", engine{runtimes: "runc nvidia"}},
		{"COMPOSE_PROFILES=torch", "", one},
		{"PROFILE=cluster", "from one server to three servers", one},
		{"PROFILE=cluster", "stay in the volume events", engine{volumes: "events"}},
		{"PROFILE=cluster APART=1", "", one},
		{"PROFILE=cluster", "", three},
		{"PROFILE=cluster", "", engine{containers: "nats nats-2", volumes: "cluster-1 events"}},
		{"", "from three servers to one server", three},
		{"", "from three servers to one server", engine{containers: "nats nats-2", volumes: "cluster-1 events"}},
		{"", "", engine{volumes: "cluster-1 events"}},
		{"", "", engine{}},
		{"MEANDER_NATS_TOKEN=a@b", "MEANDER_NATS_TOKEN: must be letters", one},
	} {
		bin := t.TempDir()
		script := `#!/bin/sh
for last; do :; done
case "$1 $2" in
"compose version") echo 2.30.0 ;;
info*) for r in RUNTIMES; do printf '"%s":{},' $r; done ;;
"ps --all") for c in CONTAINERS; do [ "$last" != label=com.docker.compose.service=$c ] || echo $c; done ;;
"volume ls") for v in VOLUMES; do [ "$last" != label=com.docker.compose.volume=$v ] || echo $v; done ;;
*) touch "$0.touched" ;;
esac
`
		here := strings.NewReplacer("RUNTIMES", v.here.runtimes, "CONTAINERS", v.here.containers, "VOLUMES",
			v.here.volumes)
		script = here.Replace(script)
		if err := harness.WriteProgram(filepath.Join(bin, "docker"), []byte(script)); err != nil {
			t.Fatal(err)
		}
		target := "compose-check"
		if v.says != "" {
			target = "up"
		}
		cmd := exec.Command("make", append([]string{"-C", root, target}, strings.Fields(v.settings)...)...)
		cmd.Env = append(os.Environ(), "MEANDER_NATS_TOKEN="+stackToken, onPath(bin))
		out, err := cmd.CombinedOutput()
		if (err == nil) != (v.says == "") || !strings.Contains(string(out), v.says) {
			t.Errorf("make up %s with %+v: %v\n%s", v.settings, v.here, err, out)
		}
		if _, err := os.Stat(filepath.Join(bin, "docker.touched")); err == nil {
			t.Errorf("make up %s with %+v: the stack was touched", v.settings, v.here)
		}
	}
}
