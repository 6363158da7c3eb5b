package integration_test

import (
	"archive/zip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// shipped are the files that git has, or will have with the next commit: what users of 'go install', of an archive and
// of an image get.
func shipped(t *testing.T) []string {
	t.Helper()
	list := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Skipf("this is no checkout of git: what it has is not known: %v", err)
	}
	var names []string
	for _, name := range strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if info, err := os.Stat(filepath.Join(root, name)); err == nil && info.Mode().IsRegular() {
			names = append(names, name)
		}
	}
	return names
}

// All that the programs are built of is in git: no generated or embedded file lies about on this machine alone.
func TestInstall_NothingIsMissing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range shipped(t) {
		copyFile(t, filepath.Join(root, name), filepath.Join(dir, name))
	}
	// It fails for an import without a package, and for a pattern of go:embed without files.
	list := exec.Command("go", "list", "-deps", "-tags", "cuda", "./services/cmd/...")
	list.Dir, list.Env = dir, append(os.Environ(), "GOWORK=off", "CGO_ENABLED=1")
	if out, err := list.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// 'go install .../services/cmd/meander@latest' makes a program that works, of the module as proxies have it.
func TestInstall_Go(t *testing.T) {
	if os.Getenv("MEANDER_INSTALL") == "" {
		t.Skip("'go install' compiles everything anew: make install-test does")
	}
	const version = "v0.1.0"
	proxy, home := t.TempDir(), t.TempDir()
	versions := filepath.Join(proxy, module, "@v")
	goMod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err == nil {
		err = os.MkdirAll(versions, 0o755)
	}
	for name, text := range map[string]string{
		"list": version, version + ".info": `{"Version":"` + version + `"}`, version + ".mod": string(goMod),
	} {
		err = errors.Join(err, os.WriteFile(filepath.Join(versions, name), []byte(text), 0o600))
	}
	err = errors.Join(err, zipModule(filepath.Join(versions, version+".zip"), module+"@"+version, shipped(t)))
	if err != nil {
		t.Fatal(err)
	}
	// A cache of its own, so that this module is in no other; the others are taken from where this build has them.
	install := exec.Command("go", "install", module+"/services/cmd/meander@latest")
	install.Dir = home
	install.Env = append(os.Environ(), "GOPROXY=file://"+proxy+",file://"+goEnv(t, "GOMODCACHE")+"/cache/download",
		"GOSUMDB=off", "GOMODCACHE="+filepath.Join(home, "modules"), "GOBIN="+home, "GOWORK=off", "CGO_ENABLED=0",
		"GOFLAGS=-modcacherw -trimpath -gcflags=all=-dwarf=false")
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("go install: %v\n%s", err, out)
	}
	program := filepath.Join(home, "meander")
	if out, err := exec.Command(program, "version").Output(); err != nil || !strings.HasPrefix(string(out), "meander 0.1.0 ") {
		t.Errorf("version: %s, %v; want that of the module", out, err)
	}
	firstMinute(t, program)
}

// goEnv is a setting of the go command.
func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// zipModule writes files of the repository as proxies have a module.
func zipModule(file, prefix string, names []string) (err error) {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	z := zip.NewWriter(out)
	defer func() { err = errors.Join(err, z.Close(), out.Close()) }()
	for _, name := range names {
		w, err := z.CreateHeader(&zip.FileHeader{Name: path.Join(prefix, name), Method: zip.Store})
		if err != nil {
			return err
		}
		in, err := os.Open(filepath.Join(root, name))
		if err != nil {
			return err
		}
		_, err = io.Copy(w, in)
		if err := errors.Join(err, in.Close()); err != nil {
			return err
		}
	}
	return nil
}

// A user who has the program and nothing else, no Go, no repository, a home of its own, makes images.
func TestInstall_FirstMinute(t *testing.T) {
	t.Parallel()
	firstMinute(t, harness.Program(t, "meander"))
}

// firstMinute runs what the README begins with, in an empty folder.
func firstMinute(t *testing.T, program string) {
	t.Helper()
	here := t.TempDir()
	home := t.TempDir()
	run := func(args ...string) string {
		c := exec.Command(program, args...)
		c.Dir, c.Env = here, []string{"HOME=" + home, "PATH=" + home}
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("meander %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	run("run", "-n", "4", `a blue sign that says "4071"`)
	if images, err := filepath.Glob(filepath.Join(here, "meander-out/*/*.png")); err != nil || len(images) != 5 {
		t.Errorf("%d images, %v; want 4 and a sheet", len(images), err)
	}
	run("examples")
	out := run("run", "-n", "2", "--steps", "2", "--reward", "glyph", "--prompts", "deploy/demo/prompts.txt")
	if !strings.Contains(out, "4 of 4 groups complete") {
		t.Errorf("the prompts of the demo:\n%s", out)
	}
}
