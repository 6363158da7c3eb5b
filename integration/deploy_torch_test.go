package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

// The worker's container has what its command names, and the sampler beside it joins it there: the worker of tests
// takes the same command.
func TestDeploy_Torch(t *testing.T) {
	sequential(t)
	t.Parallel()
	c := readCompose(t, "docker-compose.yml")
	worker, sampler := c.Services["torch"], c.Services["sampler-torch"]
	if !slices.Equal(worker.Profiles, []string{"torch"}) || !slices.Equal(sampler.Profiles, []string{"torch"}) ||
		len(worker.Ports) != 0 || !slices.Contains(sampler.Networks, worker.Networks[0]) {
		t.Errorf("profiles %v and %v, ports %v, networks %v and %v", worker.Profiles, sampler.Profiles, worker.Ports,
			worker.Networks, sampler.Networks)
	}
	dir := t.TempDir()
	folder, token := remotetest.Folder(t, "FluxPipeline", 1), filepath.Join(dir, "torch-token")
	if err := os.WriteFile(token, []byte("secret-of-the-test"), 0o600); err != nil {
		t.Fatal(err)
	}
	const inside = "/run/secrets/torch-token"
	if len(worker.Secrets) != 1 || inside != "/run/secrets/"+worker.Secrets[0] ||
		c.Secrets[worker.Secrets[0]].File == "" ||
		!slices.Contains(worker.Healthcheck.Test, inside) {
		t.Errorf("secrets %v of %v, health check %v", worker.Secrets, c.Secrets, worker.Healthcheck.Test)
	}
	var args []string
	for _, a := range worker.Command {
		args = append(args, strings.NewReplacer(inside, token, "--model=signs", "--model="+folder, "0.0.0.0:7070",
			"127.0.0.1:0").Replace(expand(a)))
	}
	address := joinWorker(t, args...)
	engine := strings.Replace(sampler.Environment["MEANDER_SAMPLER_ENGINE"], "torch:7070", address, 1)
	key := []string{"MEANDER_SAMPLER_ENGINE_KEY=secret-of-the-test"}
	byWorker(t, dir, key, append([]string{"run", "--model", folder, "--engine", engine}, torchRun...)...).must(t, 0)
	if program := sampler.Build.Args["PROGRAM"]; program != "meander-sampler" {
		t.Errorf("the sampler is %q", program)
	}
}

// The image has the versions that the worker is tested with, and leaves root.
func TestDeploy_TorchImage(t *testing.T) {
	sequential(t)
	text := read(t, "deploy/torch/Dockerfile")
	for _, want := range []string{
		"\nUSER 65532:65532\n", "PYTHONSAFEPATH=1", `ENTRYPOINT ["python", "-m", "meander.torch"]`,
		"--requirement /tmp/requirements.txt",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	tested := read(t, "pkg/client/python/tests/torch_engine/requirements.txt")
	pinned := regexp.MustCompile(`(?m)^[a-z_-]+==[0-9.]+$`).FindAllString(read(t, "deploy/torch/requirements.txt"), -1)
	for _, p := range pinned {
		if !strings.Contains(tested, p+"\n") {
			t.Errorf("%s is not what the tests have", p)
		}
	}
	for _, name := range []string{
		"torch", "diffusers", "transformers", "accelerate", "peft", "safetensors",
		"msgpack",
	} {
		if !slices.ContainsFunc(pinned, func(p string) bool { return strings.HasPrefix(p, name+"==") }) {
			t.Errorf("%s is not pinned", name)
		}
	}
}

// install.sh installs the client without what it depends on, so the versions of each of its environments name that too.
func TestDeploy_PythonDependencies(t *testing.T) {
	sequential(t)
	_, list, _ := strings.Cut(read(t, "pkg/client/python/pyproject.toml"), "\ndependencies = [")
	list, _, _ = strings.Cut(list, "]\n")
	names := regexp.MustCompile(`"([a-z0-9-]+)`).FindAllStringSubmatch(list, -1)
	if len(names) == 0 {
		t.Fatal("pyproject.toml has no dependencies")
	}
	for _, path := range []string{
		"deploy/learn/requirements.txt", "deploy/learn/requirements-trl.txt", "deploy/learn/requirements-verl.txt",
		"deploy/learn/requirements-rewards.txt", "pkg/client/python/tests/torch_engine/requirements.txt",
	} {
		text := read(t, path)
		for _, name := range names {
			if !strings.Contains(text, "\n"+name[1]+"==") {
				t.Errorf("%s has no %s", path, name[1])
			}
		}
	}
}

// make up makes the token where the profile needs one, in a folder of its owner alone.
func TestDeploy_TorchToken(t *testing.T) {
	sequential(t)
	t.Parallel()
	out, err := exec.Command("make", "-C", root, "--dry-run", "up", "PROFILE=torch").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "MEANDER_TORCH_TOKEN=$(cat 'build/torch/token')") ||
		!strings.Contains(read(t, "deploy/Makefile"), "install -d -m 700 build/torch\n") {
		t.Errorf("make up PROFILE=torch: %v\n%s", err, out)
	}
	if out, err = exec.Command("make", "-C", root, "--dry-run", "up").CombinedOutput(); err != nil ||
		strings.Contains(string(out), "TORCH_TOKEN") {
		t.Errorf("make up: %v\n%s", err, out)
	}
}
