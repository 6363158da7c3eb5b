package boot_test

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/services/internal/boot"
)

// Whatever a file holds, loading it ends in settings or an error; settings that were
// accepted print to a file that gives the same settings.
func FuzzLoad_File(f *testing.F) {
	for _, seed := range []string{
		"", "slots: 5\n", "inner: {depth: 3}\nnames: [a, 'b, c']\n", "wait: 1h\nwindow: 1.5GiB\nratio: 1e-3\n",
		"slots: !!binary aGk=\n", "a: &a [*a]\n", "? [1]\n: 2\n", "1: 2\n", "- 1\n", "slots: 0x10\n", "ratio: .inf\n",
		"inner: null\nnats.url: nats://h\n", "names: [[a]]\n", "\xff\xfe", "steps: [1, -2]\nverbose: yes\nmodel: ~\n",
		"nats: {url: 'nats://u:p@h'}\n", "secret: x\n", "wait: 2562047h47m16.854775807s\n",
	} {
		f.Add([]byte(seed))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := loadBytes(t, dir, data)
		if err != nil {
			if boot.ExitCode(err) != boot.ExitUsage {
				t.Errorf("%v is not a usage error", err)
			}
			return
		}
		if cfg.Secret != "" || cfg.NATS.Token != "" || bytes.Contains([]byte(cfg.NATS.URL), []byte("@")) {
			return // printed masked
		}
		var printed bytes.Buffer
		if err := boot.Print(&printed, cfg); err != nil {
			t.Fatal(err)
		}
		again, err := loadBytes(t, dir, printed.Bytes())
		if err != nil {
			t.Fatalf("%v in what was printed:\n%s", err, &printed)
		}
		// An absent list and an empty one print alike.
		for _, c := range []*config{&cfg, &again} {
			if len(c.Names) == 0 {
				c.Names = nil
			}
			if len(c.Steps) == 0 {
				c.Steps = nil
			}
		}
		if !reflect.DeepEqual(cfg, again) {
			t.Errorf("got  %+v\nwant %+v\nfrom\n%s", again, cfg, &printed)
		}
	})
}

func loadBytes(t *testing.T, dir string, data []byte) (config, error) {
	t.Helper()
	path := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	if err := boot.AddFlags(fs, "thing", defaults()); err != nil {
		t.Fatal(err)
	}
	if err := fs.Set("config", path); err != nil {
		t.Fatal(err)
	}
	return boot.Load("thing", defaults(), fs, nil)
}
