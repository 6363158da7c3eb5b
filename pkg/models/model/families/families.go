// Package families lists the model families of this project, for the programs that open
// models by name.
package families

import (
	"slices"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
)

// All returns every family of this project, one per line; the last ones only a worker computes, which their Open says.
// A program with more families appends them.
func All() model.Registry {
	return slices.Concat(model.Registry{
		qwenimage.Family(),
		synthetic.Family(),
	}, synthetic.VarianceFamilies(), remote.Families())
}
