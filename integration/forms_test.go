package integration_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// formed is what the containers of docker-compose.yml's servers run, as processes on loopback: the
// program that starts them, the configuration and the stores, which stay when the form changes.
type formed struct {
	dir, keys                  string
	clients, monitors, routers []string
	servers                    []*harness.Process
}

func newFormed(t *testing.T, servers int) *formed {
	t.Helper()
	f := &formed{dir: t.TempDir()}
	f.keys = filepath.Join(f.dir, "auth")
	meander(t, f.dir, "auth", "init", f.keys, "--tls").must(t, 0)
	for range servers {
		for _, list := range []*[]string{&f.clients, &f.monitors, &f.routers} {
			*list = append(*list, harness.FreeAddress(t))
		}
	}
	return f
}

func (f *formed) store(i int) string { return filepath.Join(f.dir, fmt.Sprint("store-", i)) }

func (f *formed) creds(user string) string { return filepath.Join(f.keys, user+".creds") }

func (f *formed) ca() string { return filepath.Join(f.keys, "tls/ca.pem") }

// onPath is the environment's PATH with a folder before it.
func onPath(dir string) string {
	return "PATH=" + dir + string(filepath.ListSeparator) + os.Getenv("PATH")
}

// etc is what a server of a form has in /etc/nats.
func (f *formed) etc(t *testing.T, i int, secure bool) (etc string) {
	t.Helper()
	etc = filepath.Join(t.TempDir(), "nats")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.CopyFS(etc, os.DirFS(filepath.Join(root, "deploy/nats"))))
	if secure {
		copyFile(t, filepath.Join(root, "deploy/nats/secure/access.conf"), filepath.Join(etc, "access/access.conf"))
		for _, file := range []string{"auth.conf", "tls/server.pem", "tls/server-key.pem"} {
			copyFile(t, filepath.Join(f.keys, file), filepath.Join(etc, "keys", filepath.Base(file)))
		}
	}
	addresses := strings.NewReplacer(
		"/etc/nats", etc, "/data", f.store(i),
		"0.0.0.0:4222", f.clients[i], "127.0.0.1:8222", f.monitors[i], "0.0.0.0:6222", f.routers[i],
	)
	for _, name := range []string{"nats.conf", "cluster.conf", "access/access.conf"} {
		file := filepath.Join(etc, name)
		text, err := os.ReadFile(file)
		must(err)
		must(os.WriteFile(file, []byte(addresses.Replace(string(text))), 0o600))
	}
	return etc
}

// begin starts the servers in a form, as their containers do.
func (f *formed) begin(t *testing.T, secure bool) {
	t.Helper()
	f.servers = nil
	for i := range f.clients {
		etc := f.etc(t, i, secure)
		config, env := "nats.conf", []string{
			"MEANDER_NATS_TOKEN=" + stackToken, "MEANDER_NATS_STORE=" + f.store(i),
			"MEANDER_NATS_KEYS=" + filepath.Join(etc, "keys"), onPath(filepath.Dir(harness.ServerProgram(t))),
		}
		if len(f.clients) > 1 {
			config = "cluster.conf"
			env = append(env, "MEANDER_ROUTE_PASSWORD="+stackToken, fmt.Sprint("MEANDER_SERVER_NAME=nats-", i))
			for n, address := range slices.Delete(slices.Clone(f.routers), i, i+1) {
				env = append(env, fmt.Sprintf("MEANDER_ROUTE_%d=nats://meander:%s@%s", n+1, stackToken, address))
			}
		}
		f.servers = append(f.servers, harness.Raise(t, &harness.Process{
			Name: fmt.Sprint("nats-", i), Path: filepath.Join(etc, "start"), Dir: f.dir,
			Args: []string{"--config", filepath.Join(etc, config)}, Env: env,
		}))
	}
	file := "docker-compose.yml"
	if len(f.clients) > 1 {
		file = "deploy/compose.cluster.yml"
	}
	var probe []string
	for _, s := range readCompose(t, file).Services {
		if s.Image == "meander-nats" && len(s.Healthcheck.Test) > 0 {
			probe = s.Healthcheck.Test
		}
	}
	for _, monitor := range f.monitors {
		bustest.Until(t, "the server is healthy", func() error {
			resp, err := http.Get(strings.Replace(probe[len(probe)-1], "127.0.0.1:8222", monitor, 1))
			if err == nil && resp.StatusCode != http.StatusOK {
				err = errors.New(resp.Status)
			}
			if err == nil {
				err = resp.Body.Close()
			}
			return err
		})
	}
}

// connect is a client of the form, who may do everything.
func (f *formed) connect(t *testing.T, secure bool) *bus.Bus {
	t.Helper()
	c := bus.Config{Name: "forms-test"}
	scheme := openScheme
	if secure {
		scheme, c.CredsFile, c.CAFile = "tls://", f.creds("admin"), f.ca()
	}
	c.URL = scheme + strings.Join(f.clients, ","+scheme)
	return bustest.Connect(t, c)
}

// Every change of form on the same stores finds every stream with what it had, and healthy servers.
func TestForms(t *testing.T) {
	t.Parallel()
	for name, servers := range map[string]int{"one server": 1, "three servers": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFormed(t, servers)
			changes := []bool{false, true, false, true}
			if servers > 1 { // which take some seconds to elect each other
				changes = changes[:3]
			}
			for i, secure := range changes {
				f.begin(t, secure)
				b := f.connect(t, secure)
				if i == 0 {
					if err := b.Setup(t.Context(), bus.Replicas(servers)); err != nil {
						t.Fatal(err)
					}
				}
				got := harness.Subjects(t, b, schemas.StreamPrompts, "mdr.v1.prompt.>")
				if got["mdr.v1.prompt.r"] != i {
					t.Errorf("change %d, secure %v: prompts %v, want %d", i, secure, got, i)
				}
				if _, err := b.PublishPrompt(t.Context(), "r", fmt.Append(nil, i), nil); err != nil {
					t.Fatal(err)
				}
				if err := b.Close(); err != nil {
					t.Error(err)
				}
				for _, s := range f.servers {
					s.Bury(t)
				}
			}
		})
	}
}

// A store that an earlier release made in one form is taken over; one that it made in two, or in a
// cluster, is refused and left as it is.
func TestForms_EarlierStores(t *testing.T) {
	t.Parallel()
	f := newFormed(t, 1)
	jetstream := filepath.Join(f.store(0), "jetstream")
	url, before := harness.Server(t, f.dir)
	if err := bustest.Connect(t, bus.Config{URL: url}).Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	before.Bury(t)
	if err := os.Rename(filepath.Join(f.dir, "store"), f.store(0)); err != nil {
		t.Fatal(err)
	}
	f.begin(t, false)
	if err := f.connect(t, false).Ready(t.Context()); err != nil {
		t.Error(err)
	}
	f.servers[0].Bury(t)
	for _, store := range [][2]string{{"$G/streams", "both accounts"}, {"$SYS", "its cluster"}} {
		says := store[1]
		if err := os.MkdirAll(filepath.Join(jetstream, store[0]), 0o700); err != nil {
			t.Fatal(err)
		}
		etc := f.etc(t, 0, false)
		cmd := exec.Command(filepath.Join(etc, "start"), "--config", filepath.Join(etc, "nats.conf"))
		cmd.Env = append(os.Environ(), "MEANDER_NATS_STORE="+f.store(0), onPath(filepath.Dir(harness.ServerProgram(t))))
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), says) {
			t.Errorf("%v: %s; must say %q", err, out, says)
		}
	}
}
