package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// The document has the roles as the code has them.
func TestRoles_Document(t *testing.T) {
	var table strings.Builder
	table.WriteString("| role | publishes | takes its work from | reads | writes to | removes of " +
		"|\n|---|---|---|---|---|---|\n")
	for _, g := range auth.Grants() {
		if g.Unlimited {
			fmt.Fprintf(&table, "| `%s`: %s | everything | | | | |\n", g.Role, g.Purpose)
			continue
		}
		removes := slices.Concat(g.Deletes, g.Purges)
		slices.Sort(removes)
		fmt.Fprintf(&table, "| `%s`: %s | %s | %s | %s | %s | %s |\n", g.Role, g.Purpose, code(g.Publishes),
			code(g.WorksOn()), code(g.Reads), code(g.Writes), code(slices.Compact(removes)))
	}
	inDocument(t, "deploy/guide/appendix.md", "roles", table.String())
}

// code sets names as code.
func code(names []string) string {
	var out []string
	for _, n := range names {
		out = append(out, "`"+n+"`")
	}
	return strings.Join(out, " ")
}

// guarded is a server with roles and TLS, and a folder of credentials.
type guarded struct {
	url, dir string
	// log has what the server refused.
	log func() string
}

func (g guarded) file(name string) string { return filepath.Join(g.dir, name) }

// flags are those of a command or client of a user.
func (g guarded) flags(user string) []string {
	return []string{"--nats", g.url, "--nats-creds", g.file(user + ".creds"), "--nats-tls-ca", g.file("tls/ca.pem")}
}

// credentials makes a folder of them.
func credentials(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "auth")
	meander(t, t.TempDir(), "auth", "init", dir, "--tls").must(t, 0)
	return dir
}

// ownServer starts the nats-server of go.mod with the configuration of a folder of credentials, with streams.
func ownServer(t *testing.T, dir string) guarded {
	t.Helper()
	config, err := os.ReadFile(filepath.Join(dir, "nats.conf"))
	if err != nil {
		t.Fatal(err)
	}
	config = regexp.MustCompile(`(?m)^http:.*$`).ReplaceAll(config, nil) // the harness says where
	// Without a size a server takes three quarters of what is free on the disk. On a small one the pipeline's streams
	// are promised nearly all of that, and a second account has no room for its own.
	config = regexp.MustCompile(`(?m)^ *store_dir:.*$`).ReplaceAll(config, []byte("  max_file_store: 100GB"))
	if err := os.WriteFile(filepath.Join(dir, "nats.conf"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	logged := filepath.Join(t.TempDir(), "log")
	url, _ := harness.Server(t, t.TempDir(), "-c", filepath.Join(dir, "nats.conf"), "-l", logged)
	g := guarded{strings.Replace(url, "nats://", "tls://", 1), dir, func() string {
		text, _ := os.ReadFile(logged)
		return string(text)
	}}
	meander(t, t.TempDir(), append([]string{"streams", "setup"}, g.flags("admin")...)...).must(t, 0)
	return g
}

// servers are the two that take a folder of credentials: nats-server and meander up.
func servers() map[string]func(t *testing.T) guarded {
	return map[string]func(t *testing.T) guarded{
		"nats-server": func(t *testing.T) guarded { return ownServer(t, credentials(t)) },
		"up": func(t *testing.T) guarded {
			dir, store := credentials(t), t.TempDir()
			up := background(t, store, "up", "--model", "synthetic", "--listen", "127.0.0.1:0", "--auth", dir)
			up.says(t, "meander is up on")
			return guarded{strings.Replace(running(t, store).URL, "nats://", "tls://", 1), dir, up.stderr.String}
		},
	}
}

// user is a connection that notes what the server refuses.
type user struct {
	nc    *nats.Conn
	notes chan string
	asked int
}

func (g guarded) user(t *testing.T, name string) *user {
	t.Helper()
	u := &user{notes: make(chan string, 1024)}
	key, err := nats.NkeyOptionFromSeed(g.file(name + ".creds"))
	if err != nil {
		t.Fatal(err)
	}
	var who nats.Options
	if err := key(&who); err != nil {
		t.Fatal(err)
	}
	u.nc, err = nats.Connect(g.url, key, nats.RootCAs(g.file("tls/ca.pem")),
		nats.CustomInboxPrefix(auth.InboxOf(who.Nkey)),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			select {
			case u.notes <- err.Error():
			default: // of a test that does not read them
			}
		}))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	t.Cleanup(u.nc.Close)
	return u
}

// refused says whether the server refuses what do asks: whether a note came before that of a question which it refuses
// everyone.
func (u *user) refused(t *testing.T, do func(nc *nats.Conn) error) (refused bool) {
	t.Helper()
	if err := errors.Join(do(u.nc), u.nc.Flush()); err != nil {
		t.Fatal(err)
	}
	if u.nc.LastError() == nil { // nothing was refused so far: the note came before the answer to Flush
		return false
	}
	u.asked++
	last := fmt.Sprintf("$SYS.REQ.MARK.%d", u.asked)
	if err := errors.Join(u.nc.Publish(last, nil), u.nc.Flush()); err != nil {
		t.Fatal(err)
	}
	for {
		if note := bustest.Receive(t, "the note of a refusal", u.notes); strings.Contains(note, last) {
			return refused
		}
		refused = true
	}
}

// sends is a message, with an answer that no one waits for.
func sends(subject, data string) func(nc *nats.Conn) error {
	return func(nc *nats.Conn) error { return nc.PublishRequest(subject, nc.NewInbox(), []byte(data)) }
}

// listens is an interest for a moment.
func listens(subject, queue string) func(nc *nats.Conn) error {
	return func(nc *nats.Conn) error {
		s, err := nc.QueueSubscribeSync(subject, queue)
		if err == nil {
			err = errors.Join(nc.Flush(), s.Unsubscribe())
		}
		return err
	}
}

// right is a row of the matrix.
type right struct {
	what string
	do   func(nc *nats.Conn) error
	may  []string
}

// matrix is what must not be done by others than those named; the admin may do everything. The
// subjects have a run of their own each, so that what is stored is told apart.
var matrix = append([]right{
	{"publish a prompt", sends("mdr.v1.prompt.a", "x"), []string{"trainer", "advantage"}},
	{"publish a prompt of another run", sends("mdr.v1.prompt.b", "x"), []string{"trainer", "advantage"}},
	{"claim a group", sends("mdr.v1.group.a.u", "x"), []string{"intake"}},
	{"ask for a sample", sends("mdr.v1.request.a.lane.u.0.main", "x"), []string{"intake", "reward"}},
	{"forge a step", sends("mdr.v1.step.a.u.0.main.t.0", "x"), []string{"sampler"}},
	{"forge a trajectory", sends("mdr.v1.trajectory.a.u.0.main", "x"), []string{"intake", "reward", "sampler"}},
	{"forge a reward", sends("mdr.v1.reward.a.u.u.0", "x"), []string{"intake", "reward"}},
	{"forge a reward where it is stored", sends("mdr.v1.reward.3.a.u.u.0", "x"), nil},
	{"forge an opening", sends("mdr.v1.opening.a.u.u", "x"), []string{"intake"}},
	{"forge a verdict", sends("mdr.v1.verdict.a.u.0.human", "x"), []string{"scorer"}},
	{"forge an advantage", sends("mdr.v1.advantage.a.u", "x"), []string{"advantage"}},
	{"forge a batch", sends("mdr.v1.batch.a.u", "x"), []string{"advantage"}},
	{"publish a policy", sends("mdr.v1.policy.lane.main", "x"), []string{"sampler", "trainer"}},
	{"set the policy", sends("$KV.mdr-policy.lane.main", "x"), []string{"sampler", "trainer"}},
	{"take a lane for a trainer", sends("$KV.mdr-leases.lane.main", "x"), []string{"trainer"}},
	{"end the lease of a lane", sends("$JS.API.STREAM.MSG.DELETE.KV_mdr-leases", `{"seq":999}`), nil},
	{"say that weights are in use", sends(schemas.AppliedSubject("lane", schemas.TenantMain, "instance"), "x"), []string{"sampler"}},
	{"publish a control", sends("mdr.v1.control.a", "x"), []string{"intake"}}, // of a rule
	{"publish an alarm", sends("mdr.v1.alarm.a.kl", "x"), []string{"intake"}},
	{"rule on a run", sends("$KV.mdr-control.a", "x"), []string{"intake"}},
	{"change the spec of another run", sends("$KV.mdr-runs.b", "x"), []string{"trainer"}},
	{"count for a run", sends("$KV.mdr-counts.counts1.b", "x"), []string{"intake"}},
	{"change the secret of seals", sends("$KV.mdr-seal.steps", "x"), []string{"sampler"}},
	{"read the secret of seals", sends("$JS.API.DIRECT.GET.KV_mdr-seal.$KV.mdr-seal.steps", ""), []string{"sampler"}},
	{"write a blob", sends("$O.mdr-blobs.M.x", "x"), []string{"intake", "sampler", "reward", "advantage", "trainer", "teacher"}},
	{"ask a scorer", sends("mdr.v1.score.colour", "x"), []string{"reward"}},
	{"answer a scorer's queue", listens("mdr.v1.score.colour", "colour"), []string{"scorer"}},
	{"listen to a scorer's queue", listens("mdr.v1.score.>", ""), nil},
	{"ask an interaction", sends("mdr.v1.interact.tutor", "x"), []string{"reward", "sampler"}},
	{"answer an interaction's queue", listens("mdr.v1.interact.tutor", "tutor"), []string{"scorer"}},
	{"listen to an interaction's queue", listens("mdr.v1.interact.>", ""), nil},
	{"ask a teacher", sends("mdr.v1.teacher.reference", "x"), []string{"trainer"}},
	{"answer a teacher's queue", listens("mdr.v1.teacher.reference", "reference"), []string{"teacher"}},
	{"listen to a teacher's queue", listens("mdr.v1.teacher.>", ""), nil},
	{"listen to all events", listens("mdr.v1.>", ""), nil},
	{"listen to all inboxes", listens("_INBOX.>", ""), nil},
	{"listen to another's inbox", listens("_INBOX.UCN3SBM6WPYNSWFSDNUQ7VSEAGDBXYRXGTY7ZSEFFXTRUYYDQ2Z34NOW.>", ""), nil},
	{"listen to the server", listens("$JS.>", ""), nil},
	{"speak in another's inbox", sends("_INBOX.UCN3SBM6WPYNSWFSDNUQ7VSEAGDBXYRXGTY7ZSEFFXTRUYYDQ2Z34NOW.x", "x"), []string{"intake"}},
	{"purge steps", sends("$JS.API.STREAM.PURGE.MDR_STEPS", `{"filter":"mdr.v1.step.none.>"}`), []string{"intake", "sampler"}},
	{"purge advantages", sends("$JS.API.STREAM.PURGE.MDR_ADVANTAGES", `{"filter":"mdr.v1.advantage.none.*"}`), []string{"intake"}},
	{"purge trajectories", sends("$JS.API.STREAM.PURGE.MDR_TRAJECTORIES", `{"filter":"mdr.v1.trajectory.none.*.*.*"}`), []string{"intake"}},
	{"purge the log of controls", sends("$JS.API.STREAM.PURGE.MDR_CONTROL", `{"filter":"mdr.v1.control.none"}`), nil},
	{"purge versions of weights", sends("$JS.API.STREAM.PURGE.MDR_POLICIES", `{"filter":"mdr.v1.policy.none.main"}`), nil},
	{"delete a prompt", sends("$JS.API.STREAM.MSG.DELETE.MDR_PROMPTS", `{"seq":999}`), []string{"intake"}},
	{"delete a step", sends("$JS.API.STREAM.MSG.DELETE.MDR_STEPS", `{"seq":999}`), []string{"sampler"}},
	{"delete a trajectory", sends("$JS.API.STREAM.MSG.DELETE.MDR_TRAJECTORIES", `{"seq":999}`), []string{"intake", "reward", "sampler"}},
	{"delete an advantage", sends("$JS.API.STREAM.MSG.DELETE.MDR_ADVANTAGES", `{"seq":999}`), []string{"advantage"}},
	{"delete a dead letter", sends("$JS.API.STREAM.MSG.DELETE.MDR_DEAD", `{"seq":999}`), nil},
	{"make a stream", sends("$JS.API.STREAM.CREATE.MDR_X", "{"), nil},
	{"change a stream", sends("$JS.API.STREAM.UPDATE.MDR_STEPS", "{"), nil},
	{"copy a stream", sends("$JS.API.STREAM.SNAPSHOT.MDR_STEPS", "{"), nil},
	{"take work from the reward service", sends("$JS.API.CONSUMER.MSG.NEXT.MDR_TRAJECTORIES.reward", `{"no_wait":true}`), []string{"reward"}},
	{"take work from samplers", sends("$JS.API.CONSUMER.MSG.NEXT.MDR_REQUESTS.sampler-none", `{"no_wait":true}`), []string{"sampler"}},
	{"take requests away", sends("$JS.API.CONSUMER.CREATE.MDR_REQUESTS.thief", "{"), []string{"sampler"}},
	{"acknowledge as a trainer", sends("$JS.ACK.MDR_ADVANTAGES.x.1.1.1.1.0", "+ACK"), []string{"trainer"}},
	{"acknowledge where no place is kept", sends("$JS.ACK.MDR_STEPS.x.1.1.1.1.0", "+ACK"), nil},
	{"copy a stream into another", sends("$JS.API.STREAM.RESTORE.MDR_X", "{"), nil},
	{"move a stream", sends("$JS.API.STREAM.LEADER.STEPDOWN.MDR_STEPS", ""), nil},
	{"take a server from a stream", sends("$JS.API.STREAM.PEER.REMOVE.MDR_STEPS", "{"), nil},
	{"list streams with their settings", sends("$JS.API.STREAM.LIST", "{"), nil},
	{"empty the account", sends("$JS.API.ACCOUNT.PURGE.meander", ""), nil},
	{"move the servers' leader", sends("$JS.API.META.LEADER.STEPDOWN", ""), nil},
	{"listen to advisories", listens("$JS.EVENT.ADVISORY.>", ""), nil},
	{"forge an advisory", sends("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.MDR_PROMPTS.intake", "{"), nil},
	{"ask the server", sends("$SYS.REQ.SERVER.PING", ""), nil},
	{"empty a bucket", sends("$JS.API.STREAM.PURGE.KV_mdr-control", "{"), nil},
	{"delete a blob", sends("$JS.API.STREAM.MSG.DELETE.OBJ_mdr-blobs", `{"seq":999}`), []string{"intake"}},
	{"purge chunks of a blob", sends("$JS.API.STREAM.PURGE.OBJ_mdr-blobs", `{"filter":"$O.mdr-blobs.C.none"}`), []string{"intake"}},
	{"delete of a bucket", sends("$JS.API.STREAM.MSG.DELETE.KV_mdr-runs", `{"seq":999}`), nil},
	{"say who is there", sends("$KV.mdr-presence.x", "x"), []string{"intake", "sampler", "reward", "advantage"}},
	{"find the services", sends("$SRV.INFO", ""), []string{"intake", "trainer", "viewer"}},
	{"answer for the services", listens("$SRV.PING.meander-intake", ""), []string{"intake", "sampler", "reward", "advantage", "teacher"}},
	{"be found as a worker", listens("$SRV.PING.meander-scorer", ""), []string{"intake", "sampler", "reward", "advantage", "teacher", "scorer"}},
	{"read prompts", sends("$JS.API.DIRECT.GET.MDR_PROMPTS", `{"seq":1}`), []string{"intake", "advantage", "viewer", "trainer"}},
	{"read any trajectory", sends("$JS.API.DIRECT.GET.MDR_TRAJECTORIES", `{"seq":1}`), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer", "scorer", "teacher"}},
	{"read a trajectory of a run", sends("$JS.API.DIRECT.GET.MDR_TRAJECTORIES.mdr.v1.trajectory.a.u.0.main", ""), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer", "scorer", "teacher"}},
	{"read a trajectory of another run", sends("$JS.API.DIRECT.GET.MDR_TRAJECTORIES.mdr.v1.trajectory.b.u.0.main", ""), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer", "scorer", "teacher"}},
	{"follow a run", sends("$JS.API.CONSUMER.CREATE.MDR_ADVANTAGES.x.mdr.v1.advantage.a.*", "{"), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer"}},
	{"follow another run", sends("$JS.API.CONSUMER.CREATE.MDR_ADVANTAGES.x.mdr.v1.advantage.b.*", "{"), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer"}},
	{"follow all runs", sends("$JS.API.CONSUMER.CREATE.MDR_ADVANTAGES.x.mdr.v1.>", "{"), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer"}},
	{"follow rewards of another run", sends("$JS.API.CONSUMER.CREATE.MDR_REWARDS.x.mdr.v1.reward.*.b.>", "{"), []string{"intake", "reward", "advantage", "trainer", "viewer"}},
	{"read a blob", sends("$JS.API.DIRECT.GET.OBJ_mdr-blobs.$O.mdr-blobs.M.x", ""), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer", "scorer", "teacher"}},
	{"read who is paused", sends("$JS.API.DIRECT.GET.KV_mdr-control.$KV.mdr-control.b", ""), []string{"intake", "sampler", "reward", "advantage", "trainer", "viewer"}},
}, consumerRights()...)

// everyRole are the users that the matrix tries.
var everyRole = []string{
	"intake", "sampler", "reward", "advantage", "trainer", "viewer", "scorer", "teacher",
}

// consumerRights are what must not be done to the durables that services take their work from, by each subject of the
// server's API, in all forms: bare, where the name is in the body alone, named and filtered.
func consumerRights() (out []right) {
	listing := []string{"intake"}
	for _, w := range []struct {
		stream, durable, owner string
		lists                  []string // who may know the names
	}{
		{"MDR_PROMPTS", "intake", "intake", listing},
		{"MDR_CONTROL", "intake-control", "intake", listing},
		{"MDR_ADVISORIES", "advisories", "intake", listing},
		{"MDR_REQUESTS", "sampler-none", "sampler", append([]string{"trainer", "viewer"}, listing...)},
		{"MDR_TRAJECTORIES", "reward", "reward", listing},
		{"MDR_VERDICTS", "reward-verdicts", "reward", listing},
		{"MDR_REWARDS", "advantage-p00", "advantage", listing},
		{"MDR_REWARDS", "advantage-p15", "advantage", listing},
	} {
		// What may be asked must do nothing: the body ends too soon.
		body := fmt.Sprintf(`{"stream_name":%q,"config":{"name":%q}`, w.stream, w.durable)
		own, at := []string{w.owner}, w.stream+"."+w.durable
		for subject, may := range map[string][]string{
			"CREATE." + w.stream: nil, "CREATE." + at: own, "CREATE." + at + ".mdr.v1.none.>": own,
			"DURABLE.CREATE." + at: nil,
			"MSG.NEXT." + at:       own, "DELETE." + at: own, "UNPIN." + at: own, "PAUSE." + at: nil, "RESET." + at: nil,
			"LEADER.STEPDOWN." + at: nil, "PEER.REMOVE." + at: nil, "PEER.EVACUATE." + at: nil,
			"LIST." + w.stream: w.lists, "NAMES." + w.stream: w.lists,
		} {
			out = append(out, right{"ask CONSUMER." + subject, sends("$JS.API.CONSUMER."+subject, body), may})
		}
		out = append(out, right{
			"acknowledge what " + w.durable + " has", sends("$JS.ACK."+at+".1.1.1.1.0", "+ACK"),
			own,
		})
	}
	return out
}

// Each role does what it must, and nothing else: on both servers, over TLS.
func TestRoles_Matrix(t *testing.T) {
	t.Parallel()
	for name, serve := range servers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := serve(t)
			admin := g.user(t, "admin")
			stored := func() (n uint64) {
				for _, spec := range schemas.Streams() {
					m, err := admin.nc.Request("$JS.API.STREAM.INFO."+spec.Name, nil, 10*time.Second)
					if err != nil {
						t.Fatal(err)
					}
					var info struct {
						State struct {
							LastSeq uint64 `json:"last_seq"`
						}
					}
					if err := json.Unmarshal(m.Data, &info); err != nil {
						t.Fatal(err)
					}
					n += info.State.LastSeq
				}
				return n
			}
			for _, role := range everyRole {
				u, before := g.user(t, role), stored()
				for _, m := range matrix {
					if slices.Contains(m.may, role) {
						continue
					}
					if !u.refused(t, m.do) {
						t.Errorf("%s may %s", role, m.what)
					}
				}
				if after := stored(); name == "nats-server" && after != before { // up works on what there is
					t.Errorf("%d messages more after all that %s may not do", after-before, role)
				}
				for _, m := range matrix {
					if slices.Contains(m.may, role) && u.refused(t, m.do) {
						t.Errorf("%s may not %s, and must", role, m.what)
					}
				}
			}
			before := stored()
			for _, m := range matrix {
				if admin.refused(t, m.do) {
					t.Errorf("the admin may not %s", m.what)
				}
			}
			if stored() == before {
				t.Error("nothing of what the admin did is stored: the refusals show nothing")
			}
			m, err := admin.nc.Request("$JS.API.STREAM.DELETE.MDR_DEAD", nil, 10*time.Second)
			if err != nil || !strings.Contains(string(m.Data), `"success":true`) {
				t.Errorf("the admin may not delete a stream: %v", err)
			}
			for _, role := range []string{"intake", "sampler", "trainer", "viewer", "scorer"} {
				if !g.user(t, role).refused(t, sends("$JS.API.STREAM.DELETE.MDR_VERDICTS", "")) {
					t.Errorf("%s may delete a stream", role)
				}
			}
		})
	}
}

// The whole pipeline, each program with its own credentials over TLS, gives the digest of a single
// process, and the server refuses nothing on the way.
func TestRoles_Pipeline(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	logs := map[string]*process{}
	for _, service := range []string{"intake", "sampler", "reward", "advantage"} {
		args := []string{
			"--health-addr", "", "--nats-url", g.url, "--nats-creds", g.file(service + ".creds"),
			"--nats-tls-ca", g.file("tls/ca.pem"), "--log-level", "debug",
		}
		if service == "sampler" {
			args = append(args, "--model", "synthetic")
		}
		logs[service] = launch(t, t.TempDir(), program(t, "meander-"+service), args...)
	}
	run := func(more ...string) summary {
		args := append([]string{
			"run", "--json", "--run", "a", "--seed", "3", "-n", "4", "--out", "-", "a red fox",
			"two owls",
		}, more...)
		_, sum := meander(t, t.TempDir(), args...).must(t, 0).parse(t)
		return sum
	}
	want := run("--model", "synthetic")
	if got := run(g.flags("trainer")...); got.Digest != want.Digest || got.Trajectories != 8 {
		t.Errorf("digest %s of %d trajectories, want %s of 8", got.Digest, got.Trajectories, want.Digest)
	}
	for _, args := range [][]string{
		{"verify", "--run", "a"},
		{"show", "--run", "a"},
		{"status", "a"},
		{"streams"},
		{"runs", "ls"},
		{"dead", "ls"},
	} {
		meander(t, t.TempDir(), append(args, g.flags("viewer")...)...).must(t, 0)
	}
	if out := meander(t, t.TempDir(), append([]string{"runs", "ls", "--json"}, g.flags("trainer")...)...).must(t, 0); !strings.Contains(out.stdout, `"run":"a"`) {
		t.Errorf("runs ls by a trainer: %s", out.stdout)
	}
	g.steps(t, "viewer", "a")
	for _, line := range strings.Split(g.log(), "\n") {
		if strings.Contains(line, "iolation") && !strings.Contains(line, "MDR_") {
			t.Error(line)
		}
	}
	// What may not be is an error at once, with the way out.
	out := meander(t, t.TempDir(), append([]string{"pause", "a"}, g.flags("viewer")...)...).must(t, 1)
	if !strings.Contains(out.stderr, "role viewer") ||
		!strings.Contains(out.stderr, "the roles that may are intake, admin") {
		t.Errorf("pause by a viewer: %s", out.stderr)
	}
	for _, args := range [][]string{{"pause", "a"}, {"resume", "a"}} {
		meander(t, t.TempDir(), append(args, g.flags("admin")...)...).must(t, 0)
	}
	g.silent(t, logs)
}

// steps reads what a run has as a Go program does.
func (g guarded) steps(t *testing.T, user string, run schemas.Run) {
	t.Helper()
	c, err := client.Connect(t.Context(), g.url, client.WithCredentials(g.file(user+".creds")),
		client.WithCA(g.file("tls/ca.pem")))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for group, err := range c.Groups(t.Context(), run, "") {
		if err != nil {
			t.Fatal(err)
		}
		trajectory, err := c.Trajectory(t.Context(), run, group.UID, 0)
		if err == nil {
			_, err = c.Latents(t.Context(), trajectory)
		}
		if err != nil {
			t.Error(err)
		}
		return
	}
}

// silent says that nothing that was written anywhere has a secret of the folder.
func (g guarded) silent(t *testing.T, logs map[string]*process) {
	t.Helper()
	secrets := []string{}
	for _, pattern := range []string{"*.creds", "tls/*-key.pem"} {
		files, err := filepath.Glob(g.file(pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(string(text)), "\n")
			secrets = append(secrets, lines[len(lines)-1], lines[max(0, len(lines)-2)])
			if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: mode %v, want 0600", file, info.Mode())
			}
		}
	}
	outputs := map[string]string{"the server's log": g.log()}
	for name, p := range logs {
		outputs["the log of "+name] = p.log.String()
		argv, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.cmd.Process.Pid))
		if err == nil {
			outputs["the process list"] += string(argv)
		}
		outputs["--print-config of "+name] = printed(t, name, "--nats-url", g.url, "--nats-creds",
			g.file(name+".creds"))
	}
	outputs["auth.conf"] = contents(t, g.file("auth.conf"))
	outputs["users.json"] = contents(t, g.file("users.json"))
	b, err := bus.Connect(t.Context(), bus.Config{
		URL: g.url, CredsFile: g.file("admin.creds"), CAFile: g.file("tls/ca.pem"),
	}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, spec := range schemas.Streams() {
		for m, err := range b.Read(t.Context(), spec.Name, nil, bus.ReadOptions{}) {
			if spec.WorkQueue {
				break // empty, and no reader may look
			}
			if err != nil {
				t.Fatal(err)
			}
			outputs[spec.Name] += string(m.Data)
		}
	}
	for where, text := range outputs {
		for _, secret := range secrets {
			if len(secret) > 20 && !strings.HasPrefix(secret, "# ") && strings.Contains(text, secret) {
				t.Errorf("%s has a secret", where)
			}
		}
	}
}

// printed is the configuration of a service, as it prints it.
func printed(t *testing.T, service string, args ...string) string {
	t.Helper()
	text, err := exec.Command(program(t, "meander-"+service), append(args, "--print-config")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", service, err, text)
	}
	return string(text)
}

func contents(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
