package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
)

// peer is another engine in a process of its own. It reads one JSON object per line and
// answers each with one: first a configuration, answered by peerHello; then any number of
// calls, answered by what they took. It ends when its input does.
type peer struct {
	name    string
	cmd     *exec.Cmd
	in      io.WriteCloser
	encoder *json.Encoder
	out     *bufio.Scanner
}

// peerConfig is what does not change between calls.
type peerConfig struct {
	Model    string  `json:"model"`
	Height   int     `json:"height"`
	Width    int     `json:"width"`
	Steps    int     `json:"steps"`
	Scale    float64 `json:"true_cfg_scale"`
	Prompt   string  `json:"prompt"`
	Negative string  `json:"negative_prompt"`
}

// peerHello names the engine.
type peerHello struct {
	Engine string `json:"engine"`
}

// peerCall asks for the mean of calls of a batch repeated for at least Seconds.
type peerCall struct {
	Batch   int     `json:"batch"`
	Threads int     `json:"threads"`
	Seconds float64 `json:"seconds"`
}

func startPeer(ctx context.Context, command string, config any, stderr io.Writer) (*peer, error) {
	words := strings.Fields(command)
	if len(words) == 0 {
		return nil, usage(errors.New("--peer: empty; needs a command line"))
	}
	p := &peer{cmd: exec.CommandContext(ctx, words[0], words[1:]...)}
	p.cmd.Stderr = stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start peer: %w", err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start peer: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, usage(fmt.Errorf("--peer: %w", err))
	}
	p.encoder, p.out = json.NewEncoder(p.in), bufio.NewScanner(out)
	var hello peerHello
	if err := p.ask(config, &hello); err != nil {
		return nil, errors.Join(err, p.close())
	}
	p.name = hello.Engine
	return p, nil
}

func (p *peer) ask(request, answer any) error {
	if err := p.encoder.Encode(request); err != nil {
		return fmt.Errorf("ask peer: %w", err)
	}
	if !p.out.Scan() {
		return errors.Join(errors.New("the peer ended without an answer"), p.out.Err())
	}
	if err := json.Unmarshal(p.out.Bytes(), answer); err != nil {
		return fmt.Errorf("answer %.80q of the peer: %w", p.out.Text(), err)
	}
	return nil
}

func (p *peer) paintFor(call peerCall) (timing, error) {
	var t timing
	if err := p.ask(call, &t); err != nil {
		return t, err
	}
	if !(t.total() > 0) {
		return t, fmt.Errorf("answer %.80q of the peer: no time", p.out.Text())
	}
	return t, nil
}

// close ends the process.
func (p *peer) close() error {
	if err := errors.Join(p.in.Close(), p.cmd.Wait()); err != nil {
		return fmt.Errorf("peer %s: %w", p.cmd.Args[0], err)
	}
	return nil
}
