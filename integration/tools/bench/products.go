package main

import (
	"context"
	"errors"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// gemmShape is a product of a network: dst [m, n] = x [m, k] w^T.
type gemmShape struct{ m, n, k int }

// product is a shape and how often one evaluation has it.
type product struct {
	gemmShape
	times int
}

// productsOf returns the products of one evaluation of the model in dir for batch prompts
// and as many negative ones, at its default size. Those of a single row are left out: they
// depend on the timestep alone.
func productsOf(ctx context.Context, dir string, batch int, prompt, negative string) (_ []product, err error) {
	device, err := cpu.NewDevice(cpu.Options{Threads: 1})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	listener := &listener{Device: device}
	m, err := families.All().Open(dir, model.Options{Device: listener})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	card := m.Card()
	conds, err := m.Encode(ctx, []string{prompt, negative})
	if err != nil {
		return nil, err
	}
	tokens, err := card.Tokens(card.Size)
	if err != nil {
		return nil, err
	}
	rows, n := make([]model.Row, 2*batch), tokens*card.LatentChannels
	for i := range rows {
		rows[i] = model.Row{
			X: make([]float32, n), Sigma: 0.5, Conditioning: conds[i%2], Guidance: float32(card.Guidance),
			Dst: make([]float32, n),
		}
	}
	listener.heard = nil
	if err := m.Velocity(ctx, rows, card.Size); err != nil {
		return nil, err
	}
	return listener.heard, nil
}

// listener is a device that notes the products that are asked of it, in order.
type listener struct {
	tensor.Device
	heard []product
}

// Run hands out a session that listens. The device computes with one thread.
func (l *listener) Run(ctx context.Context, wide bool, f func(tensor.Session) error) error {
	return l.Device.Run(ctx, wide, func(s tensor.Session) error { return f(&listening{s, l}) })
}

type listening struct {
	tensor.Session
	to *listener
}

func (s *listening) Linear(dst, x tensor.Matrix, w tensor.Weight, e tensor.Epilogue) {
	s.Session.Linear(dst, x, w, e)
	shape := gemmShape{x.Rows, w.N(), w.K()}
	if shape.m == 1 {
		return
	}
	for i := range s.to.heard {
		if s.to.heard[i].gemmShape == shape {
			s.to.heard[i].times++
			return
		}
	}
	s.to.heard = append(s.to.heard, product{shape, 1})
}
