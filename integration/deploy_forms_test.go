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

	"github.com/meander-rl/meander/integration/harness"
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
			if !s.ReadOnly || !slices.Contains(s.CapDrop, "ALL") || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
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
				of := map[string]string{"sampler-gpu": "sampler", "streams": "admin"}[name]
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
	if err != nil || !strings.Contains(string(out), "--file deploy/compose.secure.yml --file deploy/compose.cluster.yml --file deploy/compose.secure-cluster.yml") {
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
	access := strings.NewReplacer("/etc/nats/keys", keys+"/tls", "../keys/", "../../auth/").Replace(read(t, "deploy/nats/secure/access.conf"))
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
	if options.Authorization != "" || len(options.Nkeys) < 8 || options.TLSConfig == nil || !options.JetStream || options.StoreDir != "/data" {
		t.Errorf("token %q, %d users, TLS %v, JetStream %v on %q", options.Authorization, len(options.Nkeys), options.TLSConfig != nil, options.JetStream, options.StoreDir)
	}
	if options.ServerName != "nats-2" || len(options.Routes) != 2 || options.Cluster.Password != "secret-of-the-test" || !options.Cluster.NoAdvertise {
		t.Errorf("server %q, routes %v, cluster %+v", options.ServerName, options.Routes, options.Cluster)
	}
}
