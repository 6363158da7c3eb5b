package integration_test

import (
	"archive/zip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
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
	if out, err := exec.Command(program, "version").Output(); err != nil ||
		!strings.HasPrefix(string(out), "meander 0.1.0 ") {
		t.Errorf("version: %s, %v; want that of the module", out, err)
	}
	firstMinute(t, program)
}

// deploy/Dockerfile makes an image whose program works: by a builder that runs here, or step by step in a folder.
func TestInstall_Image(t *testing.T) {
	if os.Getenv("MEANDER_INSTALL") == "" {
		t.Skip("an image compiles everything: make install-test does")
	}
	for _, builder := range []string{"buildah", "podman", "docker"} {
		if exec.Command(builder, "info").Run() != nil {
			continue
		}
		build := exec.Command(builder, "build", "--build-arg", "PROGRAM=meander", "--file", "deploy/Dockerfile", ".")
		build.Dir = root
		if out, err := build.CombinedOutput(); err != nil {
			t.Errorf("%s build: %v\n%s", builder, err, out)
		}
		return
	}
	t.Log("no builder runs here (buildah, podman, docker): the steps of the file run in a folder, and not its base " +
		"images")
	machine := t.TempDir()
	at := func(path string) string { return filepath.Join(machine, path) }
	for _, name := range inContext(t, shipped(t)) {
		copyFile(t, filepath.Join(root, name), at(filepath.Join("src", name)))
	}
	copyFile(t, filepath.Join(root, "LICENSE"), at("etc/ssl/certs/ca-certificates.crt")) // of the base image
	stages := regexp.MustCompile(`(?m)^FROM (\S+) AS (source|build|static)$`).Split(read(t, "deploy/Dockerfile"), -1)
	if len(stages) != 4 {
		t.Fatalf("%d stages source, build and static in deploy/Dockerfile; want each once", len(stages)-1)
	}
	beginning := regexp.MustCompile(`(^|\s)/(src|out)\b`)
	for _, stage := range []string{stages[1], strings.SplitAfter(stages[2], "\n\n")[0]} {
		for _, m := range regexp.MustCompile(`(?m)^RUN (?:--mount=\S+ )*(.*)$`).FindAllStringSubmatch(stage, -1) {
			run := exec.Command("sh", "-ec", beginning.ReplaceAllString(m[1], "${1}"+machine+"/$2"))
			run.Dir, run.Env = at("src"), append(os.Environ(), "VERSION=devel", "GOWORK=off", "MAKEFLAGS=",
				"MAKEOVERRIDES=")
			if out, err := run.CombinedOutput(); err != nil {
				t.Fatalf("RUN %s: %v\n%s", m[1], err, out)
			}
		}
	}
	image := t.TempDir()
	for _, m := range regexp.MustCompile(`(?m)^COPY --from=\S+ (?:--chown=\S+ )?(\S+) (\S+)$`).FindAllStringSubmatch(stages[3], -1) {
		from, to := at(strings.ReplaceAll(m[1], "${PROGRAM}", "meander")), filepath.Join(image, m[2])
		if strings.HasSuffix(m[2], "/") {
			to = filepath.Join(to, filepath.Base(from))
		}
		if info, err := os.Stat(from); err != nil {
			t.Fatalf("COPY %s: %v", m[1], err)
		} else if !info.IsDir() {
			copyFile(t, from, to)
		} else if err := os.CopyFS(to, os.DirFS(from)); err != nil {
			t.Fatalf("COPY %s: %v", m[1], err)
		}
	}
	firstMinute(t, filepath.Join(image, "program"))
}

// inContext are the files that a builder is sent.
func inContext(t *testing.T, names []string) (sent []string) {
	t.Helper()
	ignored := strings.Fields(read(t, ".dockerignore"))
	for _, name := range names {
		top, _, _ := strings.Cut(name, "/")
		if !slices.Contains(ignored, top) {
			sent = append(sent, name)
		}
	}
	return sent
}

// The wheel is built of all files that git has of the client, and of the vectors to which it has a link.
func TestInstall_Wheel(t *testing.T) {
	t.Parallel()
	var want []string
	for _, name := range shipped(t) {
		if file, is := strings.CutPrefix(name, "pkg/client/python/"); is {
			want = append(want, file)
		} else if file, is := strings.CutPrefix(name, "schemas/vectors/"); is {
			want = append(want, "meander/certify/vectors/"+file)
		}
	}
	dir := t.TempDir()
	python := filepath.Join(dir, "python") // in place of a Python with the package build: lists what it is given
	list := "#!/bin/sh\nset -e\nmkdir -p \"$5\"\ncd \"$7\" && find . -type f >\"$5/meander_rl-files\"\n"
	if err := harness.WriteProgram(python, []byte(list)); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("deploy/release/wheel", python, dir, filepath.Join(dir, "out"))
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := os.ReadFile(filepath.Join(dir, "out", "meander_rl-files"))
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(strings.ReplaceAll(string(out), "./", ""))
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Contains(got, "meander/certify/vectors/losses.json") || !slices.Equal(got, want) {
		t.Errorf("built of %d files, want %d:\n%q\n%q", len(got), len(want), got, want)
	}
}

// A program of an environment of Python starts the workers of that environment, activated or not.
func TestInstall_EnvironmentOfPython(t *testing.T) {
	t.Parallel()
	environment := t.TempDir()
	program := filepath.Join(environment, "bin", "meander")
	copyFile(t, harness.Program(t, "meander"), program)
	err := errors.Join(os.WriteFile(filepath.Join(environment, "pyvenv.cfg"), nil, 0o600),
		harness.WriteProgram(filepath.Join(environment, "bin", "python3"),
			[]byte("#!/bin/sh\necho of the environment >&2\nexit 78\n")))
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(program, "run", "-n", "1", "--engine", "torch", "a red fox")
	c.Dir, c.Env = t.TempDir(), []string{"HOME=" + t.TempDir(), "PATH=/usr/bin:/bin"}
	if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "of the environment") {
		t.Errorf("%v\n%s", err, out)
	}
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
