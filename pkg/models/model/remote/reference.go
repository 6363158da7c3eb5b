package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// Reference has Python make one sample by the pipeline of diffusers itself, of which it writes sigmas, timesteps,
// states and pixels to a new file; args are those of meander.torch.reference. It returns what that prints. The error
// is that there is no such Python, or what the pipeline cannot do.
func Reference(ctx context.Context, dir, out string, args ...string) ([]byte, error) {
	python, err := interpreter()
	if err != nil {
		return nil, explain(err)
	}
	all := append([]string{"-m", "meander.torch.reference", "--model", dir, "--out", out}, args...)
	var answer, said bytes.Buffer
	c := exec.CommandContext(ctx, python, all...)
	c.Stdout, c.Stderr, c.WaitDelay = &answer, &said, finishWithin
	if err := c.Run(); err != nil {
		if _, ended := errors.AsType[*exec.ExitError](err); !ended {
			return nil, fmt.Errorf("start %s: %w", python, err)
		}
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return nil, fmt.Errorf("the pipeline of diffusers: %s", strings.TrimPrefix(lines[len(lines)-1], "error: "))
	}
	return answer.Bytes(), nil
}

// runModule runs a module of the package, and ends with exitConfig where there is none.
const runModule = `import runpy, sys
try:
    import meander
except ImportError:
    sys.exit(78)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)`

// Module runs a module of meander's Python package as a command, in the Python that workers have, until it ends or ctx
// does. It returns the exit status.
func Module(ctx context.Context, stdout, stderr io.Writer, module string, args ...string) (int, error) {
	python, err := interpreter()
	if err != nil {
		return 0, explain(err)
	}
	c := exec.CommandContext(ctx, python, append([]string{"-c", runModule, module}, args...)...)
	c.Stdout, c.Stderr, c.WaitDelay = stdout, stderr, finishWithin
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	err = c.Run()
	ended, is := errors.AsType[*exec.ExitError](err)
	switch {
	case is && ended.ExitCode() == exitConfig:
		return 0, fmt.Errorf("%s has no module meander; pip install meander-rl, or name a Python that has it with "+
			"MEANDER_PYTHON", python)
	case is && ended.Exited():
		return ended.ExitCode(), nil
	}
	return 0, err
}
