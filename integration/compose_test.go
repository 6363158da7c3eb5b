package integration_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// composed is a stack of docker-compose.yml that runs, under a name of its own.
type composed struct {
	t       *testing.T
	project string
	files   []string
	env     []string
	// ports are those of the servers on this machine, then that of the all-in-one.
	ports []string
	url   string
}

const (
	stackToken = "secret-of-the-test"
	// openScheme stands before the addresses of servers that let in who has the token.
	openScheme = "nats://meander:" + stackToken + "@"
)

// Images are built of binaries made here, on nothing, so that no registry is asked; all else is
// docker-compose.yml as it stands, alone and in the forms that make up has.
func TestCompose(t *testing.T) {
	if os.Getenv("MEANDER_COMPOSE") == "" {
		t.Skip("containers are not tested: make compose-test does, where there is an engine")
	}
	engine(t)
	images := buildImages(t)
	models, err := filepath.Abs(filepath.Join(root, "deploy/models"))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("MEANDER_MODELS", models)
	_, want := meander(t, t.TempDir(), composeRun("local", 4)...).must(t, 0).parse(t)
	t.Run("plain", func(t *testing.T) { newStack(t, images).plain(t, want) })
	t.Run("secure", func(t *testing.T) { newStack(t, images, "secure").secure(t, want) })
	t.Run("cluster", func(t *testing.T) { newStack(t, images, "cluster").cluster(t, want) })
	t.Run("secure cluster", func(t *testing.T) {
		newStack(t, images, "secure", "cluster", "secure-cluster").both(t,
			want)
	})
	t.Run("changes of form", func(t *testing.T) {
		t.Run("one server", func(t *testing.T) { newStack(t, images).changes(t, images, nil, []string{"secure"}) })
		t.Run("three servers", func(t *testing.T) {
			both := []string{"secure", "cluster", "secure-cluster"}
			newStack(t, images, "cluster").changes(t, images, both[1:2], both)
		})
	})
}

// plain is docker-compose.yml alone.
func (c *composed) plain(t *testing.T, want summary) {
	c.up("--wait")
	t.Run("containers", func(t *testing.T) { c.contained(t, 6) }) // the server, four services and the all-in-one
	t.Setenv("MEANDER_NATS_URL", c.url)

	t.Run("command line", func(t *testing.T) { c.same(t, want) })
	t.Run("Python client", c.python)
	t.Run("a sampler is killed", func(t *testing.T) {
		done := make(chan output, 1)
		go func() { defer close(done); done <- meander(t, t.TempDir(), composeRun("killed", 4)...) }()
		c.crash(t, "sampler")
		if _, got := (<-done).must(t, 0).parse(t); got.Digest != want.Digest {
			t.Errorf("digest %s with a sampler killed, want %s", got.Digest, want.Digest)
		}
	})
	t.Run("scaled", func(t *testing.T) {
		c.up("--wait", "--scale", "sampler=2")
		bustest.Until(t, "two samplers run", func() error {
			if n := len(c.containers(t, "sampler")); n != 2 {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		c.same(t, want)
	})
	t.Run("the server is killed", func(t *testing.T) {
		c.crash(t, "nats")
		c.same(t, want)
		if out := meander(t, t.TempDir(), "runs", "ls").must(t, 0); !strings.Contains(out.stdout, "killed") {
			t.Errorf("what was stored before is gone:\n%s", out.stdout)
		}
	})
	t.Run("taken down", func(t *testing.T) { c.takenDown(t, "killed") })
}

// takenDown stops the stack, starts it again on its volumes, where the run is still, and removes it.
func (c *composed) takenDown(t *testing.T, run string) {
	c.compose("stop").must(t, 0)
	for _, id := range c.containers(t, "") {
		// 0: drained in time; 137 would be the engine's patience at its end.
		if got := c.inspect(t, id); got.State.ExitCode != 0 && got.State.ExitCode != 1 {
			t.Errorf("%s ended with %d", got.Name, got.State.ExitCode)
		}
	}
	c.up("--wait") // on the same volumes
	if out := meander(t, t.TempDir(), "runs", "ls").must(t, 0); !strings.Contains(out.stdout, run) {
		t.Errorf("what was stored before is gone:\n%s", out.stdout)
	}
	c.down(t)
	left := docker(t, nil, "ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project="+c.project).stdout +
		docker(t, nil, "volume", "ls", "--quiet", "--filter", "label=com.docker.compose.project="+c.project).stdout
	if left != "" {
		t.Errorf("left behind:\n%s", left)
	}
}

// composeRun is a run of the shipped model, whose digest does not depend on its name.
func composeRun(run string, size int) []string {
	return []string{
		"run", "--json", "--run", run, "--out", "images", "--seed", "5", "-n", fmt.Sprint(size), "--reward",
		"glyph", `a green sign that says "EXIT"`,
	}
}

// engine skips the test where no containers can be run, and says what is missing.
func engine(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("docker"); err != nil {
		t.Skip("SKIPPED, no container was run: there is no docker command here")
	}
	if out := docker(t, nil, "version", "--format", "{{.Server.Version}}"); out.code != 0 {
		t.Skipf("SKIPPED, no container was run: docker reaches no engine: %s", strings.TrimSpace(out.stderr))
	}
	if out := docker(t, nil, "compose", "version", "--short"); out.code != 0 {
		t.Skipf("SKIPPED, no container was run: docker has no Compose plugin: %s", strings.TrimSpace(out.stderr))
	}
}

// docker runs the client to its end, at most five minutes.
func docker(t *testing.T, env []string, args ...string) output {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("docker %s: %v; stderr:\n%s", strings.Join(args, " "), errors.Join(err, ctx.Err()), stderr.String())
	}
	return output{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// buildImages makes the images of all services but those for GPUs and PyTorch, by service.
func buildImages(t *testing.T) map[string]string {
	t.Helper()
	images, made := map[string]string{}, map[string]string{}
	for _, file := range composeFiles {
		for name, s := range readCompose(t, file).Services {
			program := s.Build.Args["PROGRAM"]
			if s.Build.Context == "" || slices.Contains(s.Profiles, "gpu") ||
				slices.Contains(s.Profiles, "torch") {
				continue
			}
			if made[program] == "" {
				made[program] = fmt.Sprintf("meander-test-%d-%s", os.Getpid(), cmp.Or(program, "nats"))
				buildImage(t, made[program], program)
				t.Cleanup(func() { docker(t, nil, "image", "rm", "--force", made[program]) })
			}
			images[name] = made[program]
		}
	}
	return images
}

// newStack is a stack of docker-compose.yml and the forms over it, not started.
func newStack(t *testing.T, images map[string]string, forms ...string) *composed {
	t.Helper()
	c := &composed{t: t, env: []string{"MEANDER_NATS_TOKEN=" + stackToken}}
	for _, variable := range []string{"MEANDER_PORT", "MEANDER_PORT_2", "MEANDER_PORT_3", "MEANDER_ALL_IN_ONE_PORT"} {
		_, port, err := net.SplitHostPort(harness.FreeAddress(t))
		if err != nil {
			t.Fatal(err)
		}
		c.ports = append(c.ports, port)
		c.env = append(c.env, variable+"="+port)
	}
	c.project = "meander-test-" + c.ports[0]
	if len(forms) == 0 {
		c.env = append(c.env, "COMPOSE_PROFILES=all-in-one")
	}
	c.form(t, images, forms...)
	t.Cleanup(func() { c.down(t) })
	return c
}

// form has the stack take a form when it is started next.
func (c *composed) form(t *testing.T, images map[string]string, forms ...string) {
	t.Helper()
	c.url, c.files = openScheme+"127.0.0.1:"+c.ports[0], []string{"docker-compose.yml"}
	for _, form := range forms {
		c.files = append(c.files, "deploy/compose."+form+".yml")
	}
	override := map[string]any{}
	for _, file := range c.files {
		for name := range readCompose(t, file).Services {
			if images[name] != "" {
				override[name] = map[string]any{"image": images[name]}
			}
		}
	}
	data, err := json.Marshal(map[string]any{"services": override}) // JSON is YAML
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "override.yml")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	c.files = append(c.files, file)
}

// buildImage makes the image of a program as the last stage of deploy/Dockerfile does, or that of
// the server, from a folder that stands for the stage before.
func buildImage(t *testing.T, image, name string) {
	t.Helper()
	dir := t.TempDir()
	var text string
	if name == "" {
		text = natsImage(t, dir)
	} else {
		text = read(t, "deploy/Dockerfile")
		text = "ARG PROGRAM\n" + text[strings.LastIndex(text, "FROM scratch"):]
		text = strings.ReplaceAll(text, "--from=build ", "")
		copyFile(t, harness.Program(t, name), filepath.Join(dir, "src/bin", name))
		if err := os.CopyFS(filepath.Join(dir, "src/deploy/models"),
			os.DirFS(filepath.Join(root, "deploy/models"))); err != nil {
			t.Fatal(err)
		}
	}
	for _, folder := range []string{"out/data", "out/tmp", "etc/ssl/certs"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(os.WriteFile(filepath.Join(dir, "etc/ssl/certs/ca-certificates.crt"), nil, 0o644),
		os.Chmod(filepath.Join(dir, "out/tmp"), 0o777|os.ModeSticky),
		os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if out := docker(t, nil, "build", "--quiet", "--tag", image, "--build-arg", "PROGRAM="+name, dir); out.code != 0 {
		t.Fatalf("build the image of %s: %s\n%s", name, out.stderr, text)
	}
}

// natsImage is the server's image: what deploy/nats/Dockerfile says, on nothing instead of on the
// official image.
func natsImage(t *testing.T, dir string) (text string) {
	t.Helper()
	copyFile(t, harness.ServerProgram(t), filepath.Join(dir, "bin/nats-server"))
	probe := filepath.Join(dir, "bin/wget")
	build := exec.Command("go", "build", "-o", probe, "./testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, out)
	}
	if err := os.CopyFS(filepath.Join(dir, "deploy/nats"), os.DirFS(filepath.Join(root, "deploy/nats"))); err != nil {
		t.Fatal(err)
	}
	for _, tool := range []string{"sh", "grep", "mkdir", "mv", "rm"} { // of deploy/nats/start
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		copyFile(t, path, filepath.Join(dir, "bin", tool))
		libraries, err := exec.Command("ldd", path).Output() // fails for what needs none
		for _, library := range regexp.MustCompile(`/\S+`).FindAllString(string(libraries), -1) {
			if err == nil {
				copyFile(t, library, filepath.Join(dir, "lib-of-tools", library))
			}
		}
	}
	text = read(t, "deploy/nats/Dockerfile")
	from := "FROM scratch\nENV PATH=/bin\nCOPY lib-of-tools /\nCOPY bin /bin"
	text = regexp.MustCompile(`(?m)^FROM .*$`).ReplaceAllString(text, from)
	text = regexp.MustCompile(`(?m)^RUN mkdir /data .*$`).ReplaceAllString(text, "COPY --chown=65532:65532 out/data /data")
	return text
}

// copyFile copies a file.
func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), harness.WriteProgram(to, data))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// compose runs a command of Compose on the stack.
func (c *composed) compose(args ...string) output {
	c.t.Helper()
	all := []string{"compose", "--project-name", c.project}
	for _, f := range c.files {
		all = append(all, "--file", f)
	}
	return docker(c.t, c.env, append(all, args...)...)
}

// up starts what does not run.
func (c *composed) up(args ...string) {
	c.t.Helper()
	out := c.compose(append([]string{"up", "--no-build", "--detach"}, args...)...)
	if out.code != 0 {
		c.t.Fatalf("up: %s\n%s", out.stderr, c.compose("logs", "--tail", "20").stdout)
	}
}

// down removes the containers, networks and volumes.
func (c *composed) down(t *testing.T) {
	t.Helper()
	if t.Failed() {
		t.Logf("%s", c.compose("logs", "--tail", "30").stdout)
	}
	if out := c.compose("down", "--volumes", "--remove-orphans"); out.code != 0 {
		t.Errorf("down: %s", out.stderr)
	}
}

// containers are those of a service that run; of all services, those that are there.
func (c *composed) containers(t *testing.T, service string) []string {
	t.Helper()
	args := []string{"ps", "--quiet", "--no-trunc", "--filter", "label=com.docker.compose.project=" + c.project}
	if service == "" {
		args = append(args, "--all")
	} else {
		args = append(args, "--filter", "label=com.docker.compose.service="+service)
	}
	return strings.Fields(docker(t, nil, args...).stdout)
}

// container is what these tests read of docker inspect.
type container struct {
	Name  string
	State struct {
		Status        string
		Pid, ExitCode int
		Health        struct{ Status string }
	}
	Config     struct{ User string }
	HostConfig struct {
		ReadonlyRootfs bool
		CapDrop        []string
		SecurityOpt    []string
	}
	Mounts []struct {
		Source, Destination string
		RW                  bool
	}
	RestartCount int
}

func (c *composed) inspect(t *testing.T, id string) container {
	t.Helper()
	var got []container
	if out := docker(t, nil, "inspect", id); json.Unmarshal([]byte(out.stdout), &got) != nil || len(got) != 1 {
		t.Fatalf("inspect %s: %s%s", id, out.stdout, out.stderr)
	}
	return got[0]
}

// contained checks that each of so many containers is as the file asks: healthy or done, without
// root, on a read-only root, with only its volumes to write to.
func (c *composed) contained(t *testing.T, want int) {
	ids := c.containers(t, "")
	if len(ids) != want {
		t.Errorf("%d containers, want %d", len(ids), want)
	}
	for _, id := range ids {
		got := c.inspect(t, id)
		well := got.State.Health.Status == "healthy"
		if strings.Contains(got.Name, "-streams-") { // makes the streams, and ends
			well = got.State.Status == "exited" && got.State.ExitCode == 0
		}
		if !well || got.Config.User != "65532:65532" || !got.HostConfig.ReadonlyRootfs ||
			!slices.Contains(got.HostConfig.CapDrop, "ALL") || !slices.Contains(got.HostConfig.SecurityOpt,
			"no-new-privileges:true") {
			t.Errorf("%s: %+v", got.Name, got)
		}
		for _, m := range got.Mounts {
			if m.RW != (m.Destination == "/data") {
				t.Errorf("%s: %s can be written to: %v", got.Name, m.Destination, m.RW)
			}
		}
	}
}

// same runs prompts and expects the bits that they have without containers.
func (c *composed) same(t *testing.T, want summary) {
	t.Helper()
	run := strings.ToLower(regexp.MustCompile(`[^A-Za-z]+`).ReplaceAllString(t.Name(), "-"))
	if _, got := meander(t, t.TempDir(), composeRun(run, 4)...).must(t, 0).parse(t); got.Digest != want.Digest ||
		got.Complete != 1 {
		t.Errorf("%+v; want the digest %s", got, want.Digest)
	}
}

// python is the program of the guide, with its own prompt.
func (c *composed) python(t *testing.T) {
	interpreter := pythonWith(t, "nats, msgpack")
	text := regexp.MustCompile("(?s)```python\n(.*?)```").FindStringSubmatch(read(t,
		"deploy/guide/publish-and-subscribe.md"))
	if text == nil {
		t.Fatal("the page has no program")
	}
	script := strings.Replace(text[1], "nats://127.0.0.1:4222", c.url, 1)
	script = strings.Replace(script, "print(", "return print(", 1) // it would go on for ever
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	out, err := exec.CommandContext(ctx, interpreter, "-c", script).CombinedOutput()
	if err != nil || !strings.Contains(string(out), " complete ") {
		t.Errorf("%v\n%s", err, out)
	}
}

// crash ends the program of a service as a fault would, and waits until the engine has started
// it again.
func (c *composed) crash(t *testing.T, service string) {
	t.Helper()
	id := c.containers(t, service)[0]
	if pid := c.inspect(t, id).State.Pid; syscall.Kill(pid, syscall.SIGKILL) != nil {
		t.Logf("process %d is not ours to kill; the engine is asked to, which does not start it again by itself", pid)
		docker(t, nil, "kill", id).must(t, 0)
		docker(t, nil, "start", id).must(t, 0)
		return
	}
	bustest.Until(t, service+" runs again", func() error {
		got := c.inspect(t, id)
		if got.RestartCount == 0 || got.State.Health.Status != "healthy" {
			return fmt.Errorf("restarted %d times, %s", got.RestartCount, got.State.Health.Status)
		}
		return nil
	})
}
