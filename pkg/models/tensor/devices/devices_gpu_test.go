//go:build cuda

package devices_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor/devices"
)

// auto leaves out GPUs that are too old and says which and why; with no other GPU it takes the CPU. An old GPU that
// was asked for is an error. The GPUs are interpreted, each case in a process of its own.
func TestGPU_AutoLeavesOutOldOnes(t *testing.T) {
	if os.Getenv("MEANDER_LIBCUDA") != "" {
		for name, open := range map[string]func(string, devices.Options) (*devices.Set, error){
			"Open": devices.Open, "One": devices.One,
		} {
			set, err := open("auto", devices.Options{Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			var ids []string
			for _, d := range set.Devices {
				ids = append(ids, d.ID)
			}
			t.Logf("%s: %s; note %q; skipped %q; built %v", name, ids, set.Note, set.Skipped, devices.Built)
			if err := set.Close(); err != nil {
				t.Error(err)
			}
		}
		_, err := devices.Open("cuda:0", devices.Options{})
		t.Logf("cuda:0: %v", err)
		return
	}
	library := filepath.Join(t.TempDir(), "libcuda.so")
	if out, err := exec.Command("go", "build", "-tags", "cuda,netgo,osusergo", "-buildmode=c-shared", "-o", library,
		"../../../../integration/tools/libcuda").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const old = "cuda:0: ptxvm has compute capability 7.5; must be a GPU of 8.0 (Ampere) or newer, or cpu"
	for _, tt := range []struct {
		capabilities string
		want         []string
	}{
		{"75", []string{
			`Open: [cpu]; note "` + old + `"; skipped []; built true`, `One: [cpu]; note "` + old, "cuda:0: device: " + old,
		}},
		{"75,80,61,90", []string{
			`Open: [cuda:1 cuda:3]; note ""; skipped ["` + old + `" "cuda:2: ptxvm has compute capability 6.1;`,
			`One: [cuda:1]; note ""; skipped ["` + old + `"]`, "cuda:0: device: " + old,
		}},
		{"80,90", []string{`Open: [cuda:0 cuda:1]; note ""; skipped []`, `One: [cuda:0]; note ""; skipped []`}},
	} {
		c := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		gpus := string(rune('1' + strings.Count(tt.capabilities, ",")))
		c.Env = append(os.Environ(), "MEANDER_LIBCUDA="+library, "PTXVM_GPUS="+gpus,
			"PTXVM_CAPABILITIES="+tt.capabilities)
		out, err := c.CombinedOutput()
		for _, want := range tt.want {
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s: %v, want %s in\n%s", tt.capabilities, err, want, out)
			}
		}
	}
}
