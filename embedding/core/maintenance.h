// One background thread for all tables with several tiers: it moves rows down ahead of need and compacts logs.
#pragma once

namespace deeprec {

class Table;

void RegisterForMaintenance(Table* table);
// Waits until the thread has left the table.
void UnregisterFromMaintenance(Table* table);
// Asks for Table::Maintain soon; cheap, and from any thread.
void RequestMaintenance(Table* table);

}  // namespace deeprec
