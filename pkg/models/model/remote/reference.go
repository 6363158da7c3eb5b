package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
