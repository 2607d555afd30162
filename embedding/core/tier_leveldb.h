// A lower tier in a LevelDB database; the library is optional.
#pragma once

#include <memory>
#include <vector>

#include "tier.h"

namespace deeprec {

std::unique_ptr<TierStore> MakeLevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes);

}  // namespace deeprec
