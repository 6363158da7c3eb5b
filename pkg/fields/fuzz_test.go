package fields_test

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// Whatever a file holds, loading it ends in settings or an error; settings that were
// accepted print to a file that gives the same settings.
func FuzzLoad_File(f *testing.F) {
	for _, seed := range []string{
		"", "slots: 5\n", "inner: {depth: 3}\nnames: [a, 'b, c']\n", "wait: 1h\nwindow: 1.5GiB\nratio: 1e-3\n",
		"slots: !!binary aGk=\n", "a: &a [*a]\n", "? [1]\n: 2\n", "1: 2\n", "- 1\n", "slots: 0x10\n", "ratio: .inf\n",
		"inner: null\nnats.url: nats://h\n", "names: [[a]]\n", "\xff\xfe", "lanes: [a, b]\nverbose: yes\nmodel: ~\n",
		"nats: {url: 'nats://u:p@h'}\n", "secret: x\n", "wait: 2562047h47m16.854775807s\n",
	} {
		f.Add([]byte(seed))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := loadBytes(t, dir, data)
		if err != nil {
			return
		}
		if cfg.Secret != "" || cfg.Token != "" || bytes.Contains([]byte(cfg.URL), []byte("@")) {
			return // printed masked
		}
		printed := printed(t, &cfg)
		again, err := loadBytes(t, dir, []byte(printed))
		if err != nil {
			t.Fatalf("%v in what was printed:\n%s", err, printed)
		}
		// An absent list and an empty one print alike.
		for _, c := range []*config{&cfg, &again} {
			if len(c.Names) == 0 {
				c.Names = nil
			}
			if len(c.Lanes) == 0 {
				c.Lanes = nil
			}
		}
		if !reflect.DeepEqual(cfg, again) {
			t.Errorf("got  %+v\nwant %+v\nfrom\n%s", again, cfg, printed)
		}
	})
}

func loadBytes(t *testing.T, dir string, data []byte) (config, error) {
	t.Helper()
	path := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return loadFile(path, nil)
}
